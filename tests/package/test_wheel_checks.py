"""What `make wheels` looks at: it must find a wheel that is not as it should be, and try every extra."""

from __future__ import annotations

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "millpond_vllm/__init__.py": b"",
    "millpond_vllm/py.typed": b"",
    "millpond_vllm-0.1.0.dist-info/METADATA": b"License-Expression: Apache-2.0\n",
    "millpond_vllm-0.1.0.dist-info/WHEEL": b"Tag: py3-none-any\n",
    "millpond_vllm-0.1.0.dist-info/entry_points.txt": (
        b"[console_scripts]\nmillpond-vllm = millpond_vllm.cli.app:main\n[vllm.general_plugins]\n"
    ),
}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci" / "wheels"))


def wheel(folder: Path, files: dict[str, bytes], *, changed: str = "") -> Path:
    """A wheel with a RECORD of these files, of which one is another than it lists."""
    path, record = folder / "millpond_vllm-0.1.0-py3-none-any.whl", "millpond_vllm-0.1.0.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"{record},,"]
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
            archive.writestr(name, b"other" if name == changed else content)
        archive.writestr(record, "\n".join(lines))
    return path


def faults(path: Path) -> list[str]:
    import wheel_contents

    found: list[str] = wheel_contents.faults(path)
    return found


def test_a_wheel_as_it_should_be_has_no_faults(tmp_path: Path) -> None:
    assert faults(wheel(tmp_path, FILES)) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"millpond_vllm/csrc/a.cpp": b""}, "a.cpp does not belong"),
        ({"tests/test_a.py": b""}, "not millpond_vllm alone"),
        ({"millpond/kernels/native/millpond_v3.so": b""}, "kernels for v3"),
        ({"millpond_vllm-0.1.0.dist-info/WHEEL": b"Tag: py3-none-linux_x86_64\n"}, "WHEEL says"),
        ({"millpond_vllm-0.1.0.dist-info/METADATA": b""}, "no licence"),
        ({"millpond_vllm-0.1.0.dist-info/entry_points.txt": b""}, "no entry point 'millpond-vllm"),
    ],
)
def test_each_fault_of_a_wheel_is_told(tmp_path: Path, more: dict[str, bytes], said: str) -> None:
    assert said in "; ".join(faults(wheel(tmp_path, FILES | more)))


def test_a_file_that_record_does_not_list_so_is_told(tmp_path: Path) -> None:
    (fault,) = faults(wheel(tmp_path, FILES, changed="millpond_vllm/__init__.py"))
    assert fault == "millpond_vllm/__init__.py is not the file that RECORD lists"


def test_no_types_are_told(tmp_path: Path) -> None:
    files = {name: content for name, content in FILES.items() if not name.endswith("py.typed")}
    assert "py.typed is missing" in faults(wheel(tmp_path, files))[0]


def test_every_extra_is_tried() -> None:
    from extras import USES

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(USES) == set(project["optional-dependencies"]) - {"test", "docs", "dev"}


def test_an_environment_that_reaches_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import environments

    monkeypatch.setattr(environments, "BUILDERS", ("sh", "no-such-compiler"))
    with pytest.raises(environments.CheckError, match=r"^sh can be reached"):
        environments.Environment(tmp_path / "env")
