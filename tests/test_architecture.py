"""Imports go one way: between the packages, and between the rooms of `engine`. Lazy imports count."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the lowest to the highest: a room imports only rooms that stand before it. Modules that lie flat in `engine` are
# rooms of one file.
ROOMS = (
    "errors",
    "plain_json",
    "files",
    "folder_lock",
    "launcher",
    "heartbeat",
    "rendezvous",
    "distributed",
    "randomness",
    "preemption",
    "config",
    "monitoring",
    "recipes",
    "data",
    "zero",
    "modeling",
    "optim",
    "tasks",
    "checkpoints",
    "train",
    "inference",
    "planning",
    "doctor",
    "study",
)
# Attributes that DeepSpeed puts on parameters, and tensors of its wrappers.
INSIDES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_tensor",
    "ds_status",
    "ds_persist",
    "averaged_gradients",
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp16_groups",
    "bf16_groups",
    "loss_scaler",
    "checkpoint_engine",
    "_config",
)
PUBLIC_DEEPSPEED = ("deepspeed", "deepspeed.accelerator")


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a file imports, at its top or inside a function; a name behind it may be a module too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"{path}: relative import in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module, node


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str | None:
    """The room of a module of `engine`; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_room_is_listed():
    found = {path.stem for path in (ROOT / "engine").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("path", files("engine"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path):
    own = room(module_name(path))
    for module, node in imports(path):
        if module.split(".")[0] == "engine" and own is not None:
            other = room(module)
            assert other is None or ROOMS.index(other) <= ROOMS.index(own), (
                f"{path.relative_to(ROOT)}, line {node.lineno}: {own} imports {module}"
            )


@pytest.mark.parametrize("path", files("engine", "launch"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_lazy_import_says_why(path):
    """A comment on the line or directly above it; one above the first of consecutive imports serves them all.

    `engine/zero` says once, in its docstring, why it imports DeepSpeed inside functions.
    """
    lines = [re.sub(r"# noqa: \w+", "# ", line) for line in path.read_text().splitlines()]
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    zero = path.is_relative_to(ROOT / "engine" / "zero")
    found = {
        (node.lineno, node.end_lineno)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not (zero and "deepspeed" in ast.unparse(node))
    }
    explained = -1  # the last line of the block of imports that has a comment
    for first, last in sorted(found):
        reason = re.search(r"#\s*\S", " \n".join(lines[first - 1 : last])) or re.match(r"\s*#\s*\S", lines[first - 2])
        consecutive = explained > 0 and not any(line.strip() for line in lines[explained : first - 1])
        assert reason or consecutive, f"{path.relative_to(ROOT)}, line {first}: a lazy import without a reason"
        explained = last


def test_packages_import_one_way():
    above = {"models": ("engine", "launch"), "engine": ("launch",)}
    for package, forbidden in above.items():
        for path in files(package):
            wrong = [module for module, _ in imports(path) if module.split(".")[0] in forbidden]
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_no_modules_import_each_other_in_a_circle():
    edges = {
        module_name(path): {module for module, _ in imports(path) if module.split(".")[0] in ("engine", "models")}
        for path in files("engine", "models", "launch")
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join((*above[above.index(module) :], module))}"
        if module not in done:
            for other in edges.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("package", ["engine", "models", "launch"])
def test_only_engine_zero_touches_deepspeeds_insides(package):
    for path in files(package):
        if path.is_relative_to(ROOT / "engine" / "zero"):
            continue
        tree = ast.parse(path.read_text())
        inner = [module for module, _ in imports(path) if module.startswith("deepspeed.")]
        assert set(inner) <= set(PUBLIC_DEEPSPEED), f"{path.relative_to(ROOT)} imports {inner}"
        for node in ast.walk(tree):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
            )
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            if isinstance(name, str) and name in INSIDES and owner != "self":
                raise AssertionError(f"{path.relative_to(ROOT)}, line {node.lineno} uses {name}")


def test_tests_and_benchmarks_are_apart():
    for path in files("tests"):
        wrong = [module for module, _ in imports(path) if module.split(".")[0] == "benchmarks"]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
    for path in files("benchmarks"):
        if path.name != Path(__file__).name:
            assert '"tests"' not in path.read_text(), f"{path.relative_to(ROOT)} puts tests on its path"


def test_every_imported_package_is_declared():
    """Distribution names, where they differ from the imported ones."""
    import configparser

    names = {"mmdet": "onedl-mmdetection", "mmcv": "onedl-mmcv", "mmengine": "onedl-mmengine", "cv2": "opencv-python",
             "PIL": "pillow", "faster_coco_eval": "faster-coco-eval", "pydantic_core": "pydantic"}  # fmt: skip
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    declared = {re.split(r"[<>=!\[; ]", line.strip())[0] for line in lines.splitlines() if line.strip()}
    own = {"engine", "models", "launch", "ds_configs", *sys.stdlib_module_names}
    for path in files("engine", "models", "launch"):
        for module, node in imports(path):
            top = module.split(".")[0]
            name = names.get(top, top)
            assert top in own or name in declared, (
                f"{path.relative_to(ROOT)}, line {node.lineno}: {name} is not declared"
            )
