"""`onnxtrain train`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain import artifacts, cli
from onnxtrain.api import CheckpointState


def make(folder: Path, model: nn.Module, *example: torch.Tensor, loss: str = "CrossEntropyLoss") -> None:
    artifacts.generate_artifacts(
        model,
        example_args=example,
        loss=artifacts.LossType[loss],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        output_names=["y"],
    )


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))


def accuracy(folder: Path, shape: tuple[int, ...]) -> float:
    session = ort.InferenceSession(str(folder / "inference.onnx"), providers=["CPUExecutionProvider"])
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32).reshape(-1, *shape)
    (logits,) = session.run(["y"], {session.get_inputs()[0].name: images})
    return float((logits.argmax(1) == digits.target).mean())


def test_trains_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, mlp(64, 64, 10), torch.zeros(2, 64))
    assert cli.main(["train", str(tmp_path), "--data", "digits", "--learning-rate", "0.003"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert float(shown.split("test accuracy ")[1].split("%")[0]) >= 97
    assert accuracy(tmp_path, (64,)) >= 0.98
    assert CheckpointState.load_checkpoint(tmp_path / "trained_checkpoint").training_state.step == 20 * 45


def test_takes_images_for_a_convolution(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    make(tmp_path, model, torch.zeros(2, 1, 8, 8))
    assert cli.main(["train", str(tmp_path), "--data", "digits", "--epochs", "3", "--learning-rate", "0.01"]) == 0
    assert accuracy(tmp_path, (1, 8, 8)) >= 0.9


def test_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, mlp(64, 16, 10), torch.zeros(2, 64))
    given = ["train", str(tmp_path), "--data", "digits", "--epochs", "1"]
    for more in ([], ["--resume"]):
        assert cli.main([*given, *more]) == 0
    assert "90 updates in total" in capsys.readouterr().out
    assert cli.main(given) == 0
    assert "45 updates in total" in capsys.readouterr().out


def test_reads_an_npz_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, mlp(3, 8, 1), torch.zeros(2, 3), loss="MSELoss")
    x = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
    names = ort.InferenceSession(str(tmp_path / "training_model.onnx")).get_inputs()
    data = {names[0].name: x, names[1].name: x.sum(1, keepdims=True)}
    np.savez(tmp_path / "data.npz", **data)
    given = ["train", str(tmp_path), "--data", str(tmp_path / "data.npz"), "--learning-rate", "0.01", "--epochs", "60"]
    assert cli.main(given) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "accuracy" not in shown
    assert float(shown.split("updates in total: test loss ")[1].split()[0]) < 0.1

    np.savez(tmp_path / "data.npz", **(data | {names[0].name: x[:, :2]}))
    assert cli.main(given) == cli.FAILED
    assert "does not match the graph" in capsys.readouterr().err
    np.savez(tmp_path / "data.npz", **(data | {names[0].name: x[:9]}))
    assert cli.main(given) == cli.FAILED
    assert "arrays differ in length" in capsys.readouterr().err
    np.savez(tmp_path / "data.npz", other=x)
    assert cli.main(given) == cli.FAILED
    assert f"numpy.savez('data.npz', {names[0].name}=..." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (["--data", "digits"], cli.FAILED, "does not match the 64 pixels"),
        (["--data", "nowhere.npz"], cli.FAILED, "data cannot be read"),
        (["--data", str(Path(__file__).parent)], cli.FAILED, "data cannot be read"),
        (["--data", __file__], cli.FAILED, "a file of another format"),
        (["--data", "digits", "--test-share", "1"], cli.USAGE, "Invalid --test-share"),
        (["--data", "digits", "--learning-rate", "nan"], cli.USAGE, "a positive number"),
        (["--data", "digits", "--prefix", "other_"], cli.USAGE, "Artifacts are missing"),
        (["--data", "digits", "--resume"], cli.FAILED, "trained_checkpoint does not exist"),
    ],
)
def test_invalid_arguments_are_named(
    given: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, mlp(12, 8, 10), torch.zeros(2, 12))
    assert cli.main(["train", str(tmp_path), *given]) == code
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def artifact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    make(folder, mlp(64, 8, 10), torch.zeros(2, 64))
    return folder


@pytest.mark.parametrize("left", [0.0, 0.5], ids=["empty", "cut"])
@pytest.mark.parametrize("name", ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"])
def test_damaged_artifacts_are_refused(
    name: str, left: float, artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(artifact_folder, tmp_path / "damaged")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(left * len(content))])
    assert cli.main(["train", str(folder), "--data", "digits", "--epochs", "1"]) == cli.FAILED
    assert name in "".join(capsys.readouterr().err.split())
    assert not (folder / "trained_checkpoint").exists()


@pytest.mark.parametrize("name", ["eval_model.onnx", "optimizer_model.onnx", "checkpoint"])
def test_files_of_another_model_are_refused(
    name: str, artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "other", nn.Linear(64, 10), torch.zeros(2, 64))
    folder = shutil.copytree(artifact_folder, tmp_path / "mixed")
    shutil.copy(tmp_path / "other" / name, folder / name)
    assert cli.main(["train", str(folder), "--data", "digits", "--epochs", "1"]) == cli.FAILED
    assert capsys.readouterr().err


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).mean(1))


@pytest.mark.parametrize("words", [64, 5])
def test_images_do_not_fit_a_text_model(words: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, Words(), torch.zeros(2, words, dtype=torch.int64))
    assert cli.main(["train", str(tmp_path), "--data", "digits"]) == cli.FAILED
    assert "to do: give an .npz file" in " ".join(capsys.readouterr().err.split())


def test_stops_if_the_loss_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, mlp(64, 16, 10), torch.zeros(2, 64))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    state.parameters["0.bias"].data[:] = np.nan
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    assert cli.main(["train", str(tmp_path), "--data", "digits"]) == cli.FAILED
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "trained_checkpoint").exists()
