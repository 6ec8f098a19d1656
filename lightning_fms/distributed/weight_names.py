"""Names of the same weights in two houses: this module's, and those of a folder of safetensors.

A folder from elsewhere holds bare model names (`model.layers.0.self_attn.q_proj.weight`), a LightningModule puts the attribute in
front that holds the model (`net.`), and `lightning_fms.models.Llama` has names of its own for what `transformers` calls
otherwise. Nobody should have to spell that out: `match` tries each table of names and each prefix, and takes the one that
explains every tensor. A guess that leaves one tensor over is no match.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

Rename = Callable[[str], str]

# lightning_fms.models.Llama and transformers' LlamaForCausalLM; the weights themselves are the same.
LLAMA = (
    ("embedding.", "model.embed_tokens."),
    ("layers.{}.attention_norm.", "model.layers.{}.input_layernorm."),
    ("layers.{}.attention.", "model.layers.{}.self_attn."),
    ("layers.{}.ffn_norm.", "model.layers.{}.post_attention_layernorm."),
    ("layers.{}.ffn.", "model.layers.{}.mlp."),
    ("norm.", "model.norm."),
    ("head.", "lm_head."),
)


def to_llama(name: str) -> str:
    """Our Llama's name of a weight, from that in `transformers`."""
    return _renamed(name, [(theirs, ours) for ours, theirs in LLAMA])


def from_llama(name: str) -> str:
    """The name in `transformers` of a weight of our Llama."""
    return _renamed(name, LLAMA)


def is_llama(names: Collection[str]) -> bool:
    """Whether bare names are those of our Llama."""
    return any(".attention_norm." in name for name in names) and all(from_llama(name) != name for name in names)


def common_prefix(names: Collection[str]) -> str:
    """The attribute that holds the whole model, with a dot; empty where there is more than one."""
    heads = {name.split(".", 1)[0] for name in names}
    return f"{heads.pop()}." if len(heads) == 1 and all("." in name for name in names) else ""


def match(saved: Collection[str], own: Collection[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Own names of saved weights.

    Args:
        saved: names in the folder.
        own: names in the module.
        tied: own names that may be missing in the folder, as they share a weight with another.

    Returns:
        `{saved name: own name}` by the first way of naming that leaves nothing over; by the one that explains most, where none
        does. What is over is for the caller to see.
    """
    wanted, best = set(own), dict[str, str]()
    for candidate in _candidates(saved, own):
        found = {theirs: ours for theirs, ours in candidate.items() if ours in wanted}
        missing = {name for name in wanted - set(found.values()) if tied.get(name) not in found.values()}
        if len(found) == len(candidate) and not missing:
            return found
        if len(found) > len(best):
            best = found
    return best


def _candidates(saved: Collection[str], own: Collection[str]) -> Iterator[dict[str, str]]:
    prefixes = sorted({"", *(name[: i + 1] for name in own for i, c in enumerate(name) if c == ".")}, key=len)
    renames: list[Rename] = [str, to_llama, lambda name: name.removeprefix("model.")]
    for rename in renames:
        for prefix in prefixes:
            yield {name: prefix + rename(name) for name in saved}


def _renamed(name: str, table: Collection[tuple[str, str]]) -> str:
    for before, after in table:
        start, marker, end = before.partition("{}")
        if not name.startswith(start):
            continue
        index, rest = "", name[len(start) :]
        if marker:
            index, _, rest = rest.partition(".")
            rest = f".{rest}"
        if rest.startswith(end):
            return after.format(index) + rest[len(end) :]
    return name
