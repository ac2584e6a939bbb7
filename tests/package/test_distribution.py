"""A wheel and an sdist install and train without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import onnxtrain

ROOT = Path(__file__).parents[2]
SMOKE = """
import sys
import numpy, torch
import onnxtrain
from onnxtrain import ORTModule, artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer

assert onnxtrain.__file__.startswith(sys.prefix), onnxtrain.__file__
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
model, x = ORTModule(net, fallback_policy="FALLBACK_DISABLE"), torch.randn(4, 8)
model(x).sum().backward()
assert all(p.grad is not None for p in net.parameters())
torch.compile(net, backend="onnxtrain")(x).sum().backward()
assert onnxtrain.verify(net, x).is_right

artifacts.generate_artifacts(
    net,
    example_args=(x,),
    loss=artifacts.LossType.MSELoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="out",
)
module = Module("out/training_model.onnx", CheckpointState.load_checkpoint("out/checkpoint"))
optimizer = Optimizer("out/optimizer_model.onnx", module)
module.train()(x.numpy(), numpy.zeros((4, 2), numpy.float32))
optimizer.step()
print("trained", onnxtrain.__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_and_trains(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    # The dependencies, without this environment's .pth files, among which is that of the checkout.
    (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = [binaries / "python", "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, "--ignore-installed", built[kind]], cwd=tmp_path, env=clean, check=True)
    for command, expected in (
        (["python", "-c", SMOKE], f"trained {onnxtrain.__version__}"),
        (["onnxtrain", "options"], "memory_budget_bytes"),
    ):
        program = [binaries / command[0], *command[1:]]
        ran = subprocess.run(program, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert expected in ran.stdout


@pytest.mark.slow
def test_they_contain_the_package_only(built: dict[str, Path]) -> None:
    in_wheel = set(zipfile.ZipFile(built["wheel"]).namelist())
    package = ROOT / "onnxtrain"
    sources = {
        str(file.relative_to(ROOT)) for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert sources == {name for name in in_wheel if ".dist-info/" not in name}
    with tarfile.open(built["sdist"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert sources < in_sdist
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/conf.py", "tests/conftest.py"} < in_sdist
