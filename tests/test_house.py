"""The floors of docs/architecture.md: imports go down, there is no circle, and plugins see the contract alone."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE, PLUGINS = ROOT / "ktforge", ROOT / "plugins" / "ktforge_plugins"
TABLE = re.findall(r"^\| (\d) \| (.+?) \| .+? \| (.+?) \| .+? \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
#: Package → floor, and → what its row lets it import.
FLOORS = {name: int(floor) for floor, names, _ in TABLE for name in re.findall(r"`(\w+)`", names)}
GROUND = {name for name, floor in FLOORS.items() if floor == 0}
ALLOWED: dict[str, set[str]] = {}
for floor, names, below in TABLE:
    for name in re.findall(r"`(\w+)`", names):
        ALLOWED[name] = set(re.findall(r"`(\w+)`", below)) | (GROUND if floor != "0" else set())
#: Modules that are on no floor, and what they need.
KITS = {"testing": {"contract", *GROUND}, "skeleton": {"contract", *GROUND}}
ALLOWED["cli"] = {*FLOORS, *KITS}  # "everything"
#: What plugins may import of the core, beside the names of ``ktforge`` itself.
SEEN_BY_PLUGINS = {"calibration", "contract", "native", "checkpoint", "model", "disk", "text", "testing"}


def python_files(folder):
    return [p for p in sorted(folder.rglob("*.py")) if "data" not in p.relative_to(folder).parts]


def module_of(path):
    parts = path.relative_to(ROOT if path.is_relative_to(CORE) else PLUGINS.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path, *, late=True):
    """Modules that a file imports, wherever in it, ``from package import module`` as that module; ``late``: those
    within functions too."""
    tree = ast.parse(path.read_text())
    nodes = (
        ast.walk(tree)
        if late
        else [n for top in tree.body for n in ([top] if not isinstance(top, ast.If) else ast.walk(top))]
    )
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                named = f"{node.module}.{alias.name}"
                found.add(named if named in MODULES else node.module)
    return frozenset(name for name in found if name.partition(".")[0] in ("ktforge", "ktforge_plugins"))


MODULES = {module_of(p): p for p in (*python_files(CORE), *python_files(PLUGINS))}
INSIDE = {name: p for name, p in MODULES.items() if name.startswith("ktforge.") and name != "ktforge.__main__"}


def room(module):
    """``planning`` of ``ktforge.planning.kinds``."""
    return module.split(".")[1]


def test_every_package_has_its_row():
    rooms = {room(name) for name in INSIDE}
    assert rooms - KITS.keys() == FLOORS.keys()
    for name, allowed in ALLOWED.items():
        assert name == "cli" or all(FLOORS[below] < FLOORS[name] for below in allowed), name


@pytest.mark.parametrize("module", INSIDE)
def test_imports_go_down(module):
    mine = room(module)
    allowed = {mine} | (KITS.get(mine) or ALLOWED[mine])
    for other in imports(INSIDE[module]):
        assert other != "ktforge" or mine == "cli", f"{module} imports ktforge, which hands on what is above it"
        if other == "ktforge._native":
            assert mine == "native"
        elif other != "ktforge":
            assert room(other) in allowed, f"{module} imports {other}"


def test_every_import_that_the_table_allows_is_there():
    used = {}
    for module, path in INSIDE.items():
        used.setdefault(room(module), set()).update(room(o) for o in imports(path) if "." in o)
    for name, allowed in ALLOWED.items():
        if FLOORS[name] not in (0, 9):
            assert allowed - GROUND <= used[name], f"the row of {name} allows more than it uses"


def test_only_commands_import_late():
    for module, path in INSIDE.items():
        if room(module) != "cli":
            assert imports(path) == imports(path, late=False), f"{module} imports within a function"
            assert "TYPE_CHECKING" not in path.read_text(), f"{module} imports for the type checker alone"


def test_there_is_no_circle():
    below = {name: {o for o in imports(path) if o in INSIDE and o != name} for name, path in INSIDE.items()}
    while below:
        free = [name for name, others in below.items() if not others & below.keys()]
        assert free, f"a circle among {sorted(below)}"
        for name in free:
            del below[name]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("ktforge_plugins")])
def test_plugins_see_the_contract_alone(module):
    for other in imports(MODULES[module]):
        if other.startswith("ktforge."):
            assert room(other) in SEEN_BY_PLUGINS, f"{module} imports {other}"


def test_the_core_knows_no_plugin():
    for module in ("ktforge", *INSIDE):
        assert not [o for o in imports(MODULES[module]) if o.startswith("ktforge_plugins")], module
