"""An object store's address is refused wherever a checkpoint is named, with what to do instead, and before any step."""

from pathlib import Path
from typing import Any

import pytest
from tiny import Rows, Tiny, fit, trainer

from lightning_fms.callbacks import StepCheckpoint
from lightning_fms.commands.checkpoint import main
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.local_paths import refuse_remote
from lightning_fms.run_folder import locate

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*")
REFUSED = r"not an object store. Save to such a folder, and copy committed checkpoints away"


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_saving_and_going_on(form: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        StepCheckpoint("s3://bucket/run")
    with pytest.raises(ValueError, match=REFUSED):
        locate(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match=REFUSED):
        fit(ckpt_path="s3://bucket/run/step-1.ckpt", strategy=FSDPCompileStrategy(checkpoint_format=form))
    t = trainer(max_steps=1, strategy=FSDPCompileStrategy(checkpoint_format=form))
    t.fit(Tiny(), Rows(1), Rows(1))
    with pytest.raises(ValueError, match=REFUSED):
        t.save_checkpoint("memory://run/step-1.ckpt")


@pytest.mark.parametrize("words", [["list"], ["verify"], ["inspect"], ["export"]], ids=str)
def test_commands(words: list[str], capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "gs://bucket/run", *([str(tmp_path / "out")] if words == ["export"] else [])])
    assert ended.value.code == 2
    assert "not an object store" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/a/b:/c", "runs/x", "C:/x", "a:b"])
def test_folders_are_none(path: str) -> None:
    refuse_remote(path)
    refuse_remote(Path(path))
