"""Where documents come from: one module a format, all behind the `Source` protocol."""
