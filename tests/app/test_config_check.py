"""The check of a config against signatures: what it refuses, what it lets pass, and in which words."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import pytest
import torch

from lightning_fms.config_check import ConfigError, check_targets, described, matches


class Target:
    def __init__(
        self,
        size: int,
        rate: float = 0.1,
        mode: Literal["a", "b"] = "a",
        pair: tuple[float, float] = (0.0, 0.0),
        names: Sequence[str] | None = None,
        make: Callable[[], Any] | None = None,
        on: bool = False,
    ) -> None:
        raise AssertionError("a check builds nothing")


def open_target(**anything: Any) -> None:
    raise AssertionError("a check builds nothing")


NAME = f"{__name__}.Target"


def node(**arguments: Any) -> dict[str, Any]:
    return {"outer": {"_target_": NAME, "size": 3, **arguments}}


@pytest.mark.parametrize(
    "config",
    [
        node(),
        node(rate=1, mode="b", pair=[1, 2.5], names=["x"], on=True),
        node(names=None, make={"_target_": f"{__name__}.open_target", "_partial_": True, "anything": 1}),
        node(rate=None) | {"outer": {"_target_": NAME, "_partial_": True}},
        {"list": [{"_target_": f"{__name__}.open_target", "whatever": 1}]},
        {"no": {"target": 1}},
    ],
)
def test_what_fits_passes(config: dict[str, Any]) -> None:
    check_targets(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (node(sise=4), r"^outer\.sise=4: Target has no argument 'sise'; did you mean 'size'\?$"),
        (node(zzz=None), r"^outer\.zzz=null: Target has no argument 'zzz'; it has size, rate"),
        (node(size="three"), r"^outer\.size=three: Target wants a whole number$"),
        (node(size=True), r"outer\.size=true: Target wants a whole number"),
        (node(size=1.5), "wants a whole number"),
        (node(rate="fast"), "wants a number"),
        (node(mode="c"), "wants 'a' or 'b'"),
        (node(pair=[1.0]), r"outer\.pair=\[1\.0\]: Target wants a list of 2, written '\[a, b\]', each a number"),
        (node(size=3.0), r"outer\.size=3\.0: Target wants a whole number; write 3"),
        (node(names="x"), r"outer\.names=x: Target wants .* or null"),
        (node(on=1), "wants true or false"),
        (node(rate={"_target_": f"{__name__}.open_target"}), "outer.rate="),
        (node(size="???"), r"outer\.size is missing: Target needs it; give outer\.size=<value>"),
        ({"outer": {"_target_": NAME}}, "outer: Target needs 'size'"),
        ({"outer": {"_target_": f"{__name__}.Nothing"}}, r"outer\._target_=.*Nothing: cannot be imported"),
        ({"list": [{"_target_": NAME, "size": 1, "no": 1}]}, r"list\.0\.no=1"),
    ],
)
def test_a_mistake_is_one_line_with_the_value_and_the_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_targets(config)
    assert "\n" not in str(caught.value)


def test_what_the_app_fills_in_may_be_missing() -> None:
    check_targets({"outer": {"_target_": NAME, "size": "???"}}, supplied={"outer.size"})
    check_targets({"outer": {"_target_": NAME}}, supplied={"outer.size"})


def test_an_annotation_that_says_nothing_about_plain_values_is_not_judged() -> None:
    assert matches("anything", TypeVar("T"))
    assert matches("anything", Any)
    assert not matches("anything", Callable[[], Any])
    assert not matches("fast", float | torch.Tensor)
    assert matches({"a": 1}, dict[str, int])
    assert not matches([1], dict[str, int])
    assert described(int | None) == "a whole number or null"
