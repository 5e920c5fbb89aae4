"""What a stranger downloads: the wheel, the sdist, the page of an index, and the files by which a public project is
known to GitHub. Nothing here needs a network.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import trove_classifiers
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version
from readme_renderer import markdown

import fullshard
from tests.test_docs import anchors, prose_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
INFO = f"fullshard-{fullshard.__version__}.dist-info"
#: Where the repository is, and where its files are as they are: the tag of this version.
REPOSITORY = PROJECT["project"]["urls"]["Source"]
PAGES = f"{REPOSITORY}/blob/v{fullshard.__version__}/"
RAW = PAGES.replace("//github.com", "//raw.githubusercontent.com").replace("/blob/", "/")


def build(source: Path, into: Path, *targets: str) -> None:
    """Builds distributions with the hatchling of this environment."""
    chosen = [part for target in targets for part in ("-t", target)]
    call = [sys.executable, "-m", "hatchling", "build", "-d", str(into), *chosen]
    built = subprocess.run(call, cwd=source, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"fullshard-{fullshard.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return dist / f"fullshard-{fullshard.__version__}.tar.gz"


def files_in(folder: Path) -> dict[str, bytes]:
    """The files below a folder by their path in the repository, without what Python compiled."""
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix(): file.read_bytes() for file in files}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_library_and_nothing_else(wheel: Path) -> None:
    found = contents(wheel)
    info = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert info <= found.keys()
    expected = {name.removeprefix("src/"): data for name, data in files_in(ROOT / "src").items()}
    assert {name: data for name, data in found.items() if name not in info} == expected
    assert "fullshard/py.typed" in expected
    assert {"fullshard_at_start.py", "fullshard_at_start.pth"} <= expected.keys()
    assert found[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_has_all_that_is_needed_to_test_and_to_change(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    folders = ("src", "tests", "docs", "examples", "benchmarks", ".ci", ".github")
    expected = {name for folder in folders for name in files_in(ROOT / folder)}
    expected = {name for name in expected if not name.startswith("benchmarks/results/")}  # what `make bench` wrote here
    expected |= {"Makefile", "constraints.txt", "constraints-frameworks.txt", "pyproject.toml", "LICENSE", "README.md"}
    expected |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", ".pre-commit-config.yaml"}
    assert expected <= found
    assert not [name for name in found if ".venv" in name or "__pycache__" in name]


def test_the_wheel_of_the_sdist_is_the_same_to_the_byte(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path, "wheel")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> bytes:
    return contents(wheel)[f"{INFO}/METADATA"]


def test_the_metadata_is_valid_and_says_what_is_supported(metadata: bytes) -> None:
    found = Metadata.from_email(metadata)  # raises for every field that is not as the standards have it
    assert (found.name, str(found.version)) == ("fullshard", fullshard.__version__)
    assert found.metadata_version == "2.4", "older tools for uploads and mirrors refuse the newer format"
    assert not set(found.classifiers or ()) - trove_classifiers.classifiers
    pythons = pythons_of(found.classifiers or ())
    assert found.requires_python is not None
    assert all(python in found.requires_python for python in pythons)
    assert f"{pythons[0].major}.{pythons[0].minor - 1}" not in found.requires_python, "the oldest is not named"
    needed = {each.name for each in found.requires_dist or () if each.marker is None}
    assert needed == {"tabulate", "torch", "tqdm", "xxhash"}


def pythons_of(classifiers: list[str] | tuple[()]) -> list[Version]:
    """The versions of Python that classifiers name, the oldest first."""
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in classifiers)
    return sorted(Version(match[1]) for match in found if match)


class Links(HTMLParser):
    """The addresses in a page: of links, and of pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.headings: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "href":
                self.links.append(value or "")
            elif name in ("src", "srcset"):
                self.pictures += [each.split()[0] for each in (value or "").split(",")]
            elif name == "id":
                self.headings.append(f"#{value}")


def test_the_page_of_an_index_has_no_link_that_leads_nowhere(metadata: bytes) -> None:
    text = email.message_from_bytes(metadata)
    assert text["Description-Content-Type"] == "text/markdown"
    description = text.get_payload(decode=True).decode()  # type: ignore[union-attr]
    page = markdown.render(description)  # as PyPI renders it; None for a page that it refuses
    assert page is not None
    found = Links(page)
    assert len(found.pictures) >= 1
    assert len(found.links) >= 10
    for address in {*found.links, *found.pictures} - {*found.headings}:
        assert address.startswith("https://"), f"{address} is relative to nothing on an index page"
        if address.startswith(f"{REPOSITORY}/actions/"):
            continue  # the badge of CI
        base = RAW if address in found.pictures else PAGES
        assert base in address or not address.startswith((REPOSITORY, RAW.partition("/v")[0])), address
        if address.startswith(base):
            path, _, anchor = address.removeprefix(base).partition("#")
            assert (ROOT / path).exists(), f"{address}: the repository has no {path}"
            assert not anchor or anchor in anchors(ROOT / path), f"{address}: {path} has no such heading"
    readme = (ROOT / "README.md").read_text()
    assert blocks_of(description) == blocks_of(readme), "an address was put into code"


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)


def test_links_and_pictures_in_any_form_become_absolute(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "README.md").write_text(
        "[a page](docs/a.md#part) and ![a\npicture](docs/a.png), [![both](b.png)](B.md), [far](https://example.org/c)\n"
        '<picture><source media="(prefers-color-scheme: dark)" srcset="dark.png"><img alt="d" src="d.png"></picture>\n'
        '<a href="E.md">e</a> <img src="https://example.org/f.png">\n'
    )
    build(tmp_path, tmp_path, "wheel")
    (built,) = tmp_path.glob("*.whl")
    text = email.message_from_bytes(contents(built)[f"{INFO}/METADATA"]).get_payload()
    assert text == (
        f"[a page]({PAGES}docs/a.md#part) and ![a\npicture]({RAW}docs/a.png), [![both]({RAW}b.png)]({PAGES}B.md), "
        "[far](https://example.org/c)\n"
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{RAW}dark.png"><img alt="d" src="{RAW}d.png">'
        "</picture>\n"
        f'<a href="{PAGES}E.md">e</a> <img src="https://example.org/f.png">\n'
    )


def test_the_version_and_the_address_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fullshard.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == REPOSITORY
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == fullshard.__version__
    assert all(url.startswith(REPOSITORY) for url in PROJECT["project"]["urls"].values())
    for file in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        found = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", (ROOT / file).read_text())
        assert set(found) == {REPOSITORY}


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        *((str(file.relative_to(ROOT)), "github-workflows") for file in WORKFLOWS),
        (".github/ISSUE_TEMPLATE/bug.yml", "github-issue-forms"),
        (".github/ISSUE_TEMPLATE/feature.yml", "github-issue-forms"),
        (".github/ISSUE_TEMPLATE/config.yml", "github-issue-config"),
        (".github/dependabot.yml", "dependabot"),
        ("CITATION.cff", "citation-file-format"),
    ],
)
def test_a_file_is_as_its_reader_expects(file: str, schema: str) -> None:
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", ROOT / file)


def test_the_hooks_of_pre_commit_are_tools_of_the_environment() -> None:
    file = ROOT / ".pre-commit-config.yaml"
    run(sys.executable, "-m", "pre_commit", "validate-config", file)
    (repository,) = yaml.safe_load(file.read_text())["repos"]
    tools = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert tools == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert {Path(tool).name for tool in tools} <= set(PROJECT["project"]["optional-dependencies"]["test"])


def run(*call: str | Path, cwd: Path = ROOT, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """What a command prints. It must end with one of the exit codes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "FULLSHARD_"))}
    # The ranks find no accelerator, and a host name that does not resolve is no reason to fail.
    kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(call, cwd=cwd, env=kept, capture_output=True, text=True, timeout=180)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def jobs() -> Iterator[dict[str, Any]]:
    for file in WORKFLOWS:
        yield from yaml.safe_load(file.read_text())["jobs"].values()


def commands() -> Iterator[str]:
    """The commands of all jobs, for each value of a matrix."""
    for job in jobs():
        matrix = job.get("strategy", {}).get("matrix", {})
        for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
            name = re.search(r"\$\{\{ matrix\.(\w+) \}\}", line)
            yield from (line.replace(name[0], value) for value in matrix[name[1]]) if name else [line]


def test_every_command_of_make_that_is_called_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*)(?=[\w -]*:(?!=))", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [shlex.split(line)[1:] for line in commands() if line.startswith("make ")]
    found = {word for words in called for word in words if "=" not in word}
    assert found <= targets, f"the Makefile has no {sorted(found - targets)}"
    assert {"lint", "types", "quick", "test", "test-all", "test-torch", "frameworks"} <= found


def test_what_is_tested_is_what_is_said_to_be_supported() -> None:
    matrices = [job["strategy"]["matrix"] for job in jobs() if "torch" in job.get("strategy", {}).get("matrix", {})]
    assert len(matrices) == 1
    classifiers = PROJECT["project"]["classifiers"]
    assert [Version(python) for python in matrices[0]["python"]] == pythons_of(classifiers)
    torches = [Version(torch) for torch in matrices[0]["torch"]]
    dependencies = {each.name: each for each in map(Requirement, PROJECT["project"]["dependencies"])}
    (lowest,) = dependencies["torch"].specifier
    assert lowest.operator == ">="
    assert Version(lowest.version) == min(torches)
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(pinned[1]) in torches
    newest = re.search(r"^test-torch:.*TORCH=(\S+) ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert newest is not None
    assert Version(newest[1]) == max(torches)
    long = {match[1] for line in commands() if (match := re.search(r"test-torch TORCH=(\S+)", line))}
    assert {Version(torch) for torch in long} == {min(torches), max(torches)}


def test_actions_are_pinned_to_commits() -> None:
    lines = [line.strip() for file in WORKFLOWS for line in file.read_text().splitlines() if "uses:" in line]
    pins: dict[str, set[str]] = {}
    for line in lines:
        match = re.fullmatch(r"- uses: ([\w/-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", line)
        assert match is not None, line
        pins.setdefault(match[1], set()).add(match[2])
    assert "pypa/gh-action-pypi-publish" in pins
    assert all(len(versions) == 1 for versions in pins.values()), pins


def test_what_is_published_was_built_once_and_tried_on_each_system() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert [name for name, job in release.items() if "hatchling build" in str(job["steps"])] == ["build"]
    assert {"test", "try"} <= {*release["publish"]["needs"]}
    assert release["try"]["needs"] == "build"
    matrix = release["try"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["system"]} == {"ubuntu", "macos", "windows"}
    assert [Version(python) for python in matrix["python"]] == pythons_of(PROJECT["project"]["classifiers"])
    assert {*matrix["file"], *(each["file"] for each in matrix["include"])} == {"whl", "tar.gz"}
    oldest = {each["torch"].replace("==", ">=").removesuffix(".0") for each in matrix["include"] if "torch" in each}
    assert oldest == {each for each in PROJECT["project"]["dependencies"] if each.startswith("torch")}
    assert [name for name, job in release.items() if "id-token" in job.get("permissions", {})] == ["publish"]


def test_files_that_are_named_exist() -> None:
    for page in (ROOT / "SECURITY.md", ROOT / ".github" / "pull_request_template.md"):
        for name in re.findall(r"`?\b([\w./-]+\.(?:md|pth))\b", prose_of(page.read_text())):
            assert (ROOT / name).exists() or (ROOT / "src" / name).exists(), f"{page.name} names {name}"


#: Programs. Each line is written at once, since lines of two ranks share a pipe.
TWO_RANKS = """
import torch
import torch.distributed as dist
from fullshard import fully_shard

torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(f"rank {dist.get_rank()} has a gradient of {tuple(model.weight.grad.to_local().shape)}\\n", end="")
dist.destroy_process_group()
"""
UNCHANGED = """
import torch
from torch.distributed.fsdp import fully_shard

print(f"{fully_shard.__module__}\\n", end="")
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment in which the wheel was installed by name, where only torch was before.

    Torch, the other dependencies, and what they need, are links to what is installed here. pip is given no index: it
    ends with an error if the wheel needs anything else.
    """
    folder = tmp_path_factory.mktemp("bare")
    there = folder / "there"
    there.mkdir()
    for distribution in needed_by(*(Requirement(each).name for each in PROJECT["project"]["dependencies"])):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = there / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    venv.create(folder / "env", symlinks=True)
    programs = folder / "env" / "bin"
    site = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "there.pth").write_text(str(there))
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-index")
    run(*pip, "--find-links", wheel.parent, "fullshard", PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    return programs


def needed_by(*names: str) -> list[importlib.metadata.Distribution]:
    """Installed distributions: these, and what they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            requirements = map(Requirement, found[name].requires or ())
            needed = (each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""}))
            waiting += [each.name for each in needed]
    return list(found.values())


@pytest.mark.slow
def test_the_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "fullshard", "--version", cwd=tmp_path) == f"fullshard {fullshard.__version__}\n"
    where = run(installed / "python", "-c", "import fullshard; print(fullshard.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    absent = "import importlib.util; print(importlib.util.find_spec('rich'), importlib.util.find_spec('numpy'))"
    assert run(installed / "python", "-c", absent, cwd=tmp_path) == "None None\n"


@pytest.mark.slow
def test_two_ranks_train_on_what_is_installed(installed: Path, tmp_path: Path) -> None:
    """With the program that the release workflow runs on each system."""
    said = run(installed / "python", ROOT / "tests" / "installed.py", cwd=tmp_path)
    assert [line.partition(" trains like ")[0] for line in said.splitlines() if " trains like " in line] == [
        f"{front_end} on 2 ranks" for front_end in ("fully_shard", "FullyShardedDataParallel")
    ]


def torchrun(programs: Path) -> list[str | Path]:
    return [programs / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
def test_the_installed_doctor_looks_at_a_job(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(TWO_RANKS)
    job = [*torchrun(installed), "file.py"]
    said = run(installed / "fullshard", "doctor", "--steps", "2", "--", *job, cwd=tmp_path, codes=(0, 1))
    assert re.search(rf"ok +versions +fullshard {re.escape(fullshard.__version__)}, torch \S+, .* on all ranks", said)
    assert re.search(r"ok +process group +2 ranks communicate by gloo", said)


@pytest.mark.slow
def test_what_is_installed_stands_in_for_torch_where_it_is_asked_to(installed: Path, tmp_path: Path) -> None:
    """The file ``.pth`` in site-packages does so, in every process, and only with ``FULLSHARD_PATCH``."""
    (tmp_path / "file.py").write_text(UNCHANGED)
    python = installed / "python"
    assert run(python, "file.py", cwd=tmp_path, FULLSHARD_PATCH="").startswith("torch.distributed.")
    assert run(python, "file.py", cwd=tmp_path, FULLSHARD_PATCH="1") == "fullshard.fully_shard\n"
    said = run(installed / "fullshard", "run", *torchrun(installed), "file.py", cwd=tmp_path)
    assert said == "fullshard.fully_shard\n" * 2
