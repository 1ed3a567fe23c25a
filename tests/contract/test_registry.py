import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from ktforge_plugins.layouts import kt_amx
from ktforge_plugins.loaders.safetensors import SafetensorsLoader
from ktforge_plugins.preprocess.moe_to_bf16 import MoeToBf16
from ktforge_plugins.quantize import int4

from ktforge import ConfigError, Layout, Loader, Pipeline, PluginError, Registry, hookimpl
from ktforge.contract.plan import STAGES
from ktforge.contract.registry import load_file
from ktforge.testing import MemoryWriter


class Twin(Layout):
    name: ClassVar[str] = "kt-amx"

    def plan(self, spec):
        raise NotImplementedError

    def pack(self, unit, out):
        raise NotImplementedError


def plugin(name="mine", **hooks):
    """A plugin object whose attributes are hook implementations."""
    made = SimpleNamespace(__name__=name)
    for hook, value in hooks.items():

        def implementation(value=value):
            return value

        implementation.__name__ = hook
        setattr(made, hook, hookimpl(lambda value=value: value))
    return made


def test_the_core_imports_no_plugin():
    script = """
import pkgutil, sys, importlib, ktforge
def visit(path, prefix):
    for module in pkgutil.iter_modules(path, prefix):
        if module.name not in ("ktforge.__main__", "ktforge.hf"):  # which needs an extra
            visit(getattr(importlib.import_module(module.name), "__path__", []), module.name + ".")
visit(ktforge.__path__, "ktforge.")
assert all(getattr(ktforge, name) for name in ktforge.__all__)
print([m for m in sys.modules if m.startswith("ktforge_plugins") or m == "torch"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_builtins_come_in_through_entry_points():
    entries = Registry.installed().entries()
    ours = {(e.cls.stage, e.cls.name): e for e in entries if e.distribution == "ktforge"}
    assert {stage for stage, _ in ours} == {s.stage for s in STAGES}
    for (stage, name), entry in ours.items():
        assert entry.plugin == f"{stage}-{name}"


def test_a_registry_holds_what_it_is_given():
    registry = Registry(kt_amx)
    assert [e.cls for e in registry.entries()] == [kt_amx.KtAmx]
    assert registry.find("layout", "kt-amx").cls is kt_amx.KtAmx
    with pytest.raises(ConfigError, match="there is no layout called 'gguf'; installed: kt-amx"):
        registry.find("layout", "gguf")


def test_one_name_for_two_plugins_names_both_owners():
    with pytest.raises(PluginError) as caught:
        Registry(kt_amx, plugin("twin", ktforge_layouts=[Twin]))
    assert "two plugins offer the layout 'kt-amx'" in str(caught.value)
    assert "ktforge_plugins.layouts.kt_amx" in str(caught.value) and "plugin twin" in str(caught.value)


def test_a_blocked_plugin_is_left_out():
    assert Registry(int4, blocked=[int4.__name__]).entries() == []
    names = {e.plugin for e in Registry.installed(blocked=["layout-kt-amx"]).entries()}
    assert "layout-kt-amx" not in names and "quantize-int4" in names


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            {"ktforge_exporters": []},
            "plugin mine is written for the hook ktforge_exporters, which this ktforge does not",
        ),
        ({"ktforge_layouts": [int]}, "plugin mine offers <class 'int'>, which is not a Layout class"),
        ({"ktforge_layouts": None}, "plugin mine failed while it was registered"),
        ({"ktforge_loaders": [kt_amx.KtAmx]}, "which is not a Loader class"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_named(hooks, message):
    with pytest.raises(PluginError, match=message.replace("(", r"\(")):
        Registry(plugin(**hooks))


def test_a_class_without_a_name_is_refused():
    class Nameless(Loader):
        def scan(self):
            return iter(())

        def read(self, spec):
            raise NotImplementedError

        def config(self):
            return {}

    with pytest.raises(PluginError, match="plugin mine offers Nameless without a `name`"):
        Registry(plugin(ktforge_loaders=[Nameless]))


def distributions(monkeypatch, *points):
    """Pretends that these (entry point, distribution) pairs are all that is installed."""
    dists = [
        SimpleNamespace(
            name=dist,
            version="1.2",
            entry_points=[EntryPoint(name, target, "ktforge")],
            read_text={"entry_points.txt": f"[ktforge]\n{name} = {target}\n"}.get,
        )
        for name, target, dist in points
    ]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: dists)


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch):
    distributions(monkeypatch, ("layout-gone", "no_such_module_anywhere", "kt-gone"))
    with pytest.raises(
        PluginError, match=r"plugin layout-gone of kt-gone 1.2 cannot be imported \(ModuleNotFoundError"
    ):
        Registry.installed()
    assert Registry.installed(blocked=["layout-gone"]).entries() == []


def test_two_distributions_with_one_entry_point_name(monkeypatch):
    target = "ktforge_plugins.layouts.kt_amx"
    distributions(monkeypatch, ("layout-kt-amx", target, "first"), ("layout-kt-amx", target, "second"))
    with pytest.raises(PluginError, match=r"of second 1\.2 has the same entry-point name as the one of first 1\.2"):
        Registry.installed()


def test_blocking_a_plugin_that_is_not_there_names_those_that_are(monkeypatch):
    distributions(monkeypatch, ("layout-a", "no_such_module", "one"), ("layout-b", "no_such_module", "two"))
    with pytest.raises(
        ConfigError,
        match=r"there is no plugin layout-c \(did you mean layout-.\?\) to block; installed: layout-a, layout-b",
    ):
        Registry.installed(blocked=["layout-c"])
    monkeypatch.setenv("KTFORGE_BLOCK", "layout-a,layout-d")
    with pytest.raises(ConfigError, match=r"there is no plugin layout-d .* to block"):
        Registry.installed(blocked=["layout-b"])
    monkeypatch.setenv("KTFORGE_BLOCK", " layout-a, ")
    assert Registry.installed(blocked=["layout-b"]).entries() == []


def test_a_class_that_lacks_a_method_is_refused():
    class Half(Layout):
        name: ClassVar[str] = "half"

        def pack(self, unit, out):
            raise NotImplementedError

    with pytest.raises(PluginError, match="plugin mine offers the layout 'half', which lacks plan"):
        Registry(plugin(ktforge_layouts=[Half]))


@pytest.mark.parametrize("text", ["import ktforge", "def ktforge_layouts():\n    return []"])
def test_a_file_without_hooks(tmp_path, text):
    file = tmp_path / "empty.py"
    file.write_text(text)
    with pytest.raises(PluginError, match=r"plugin empty\.py implements no hook"):
        Registry().add(load_file(file), name="empty.py")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "import nothing_like_this", r"a\.py cannot be imported \(ModuleNotFoundError: No module named"),
        ("a.py", "def (", r"a\.py cannot be imported \(SyntaxError: .*line 1"),
        ("a.py", None, r"a\.py does not exist"),
        ("a.txt", "", r"a\.txt is not a Python file"),
    ],
)
def test_a_file_that_is_no_plugin(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PluginError, match=message):
        load_file(tmp_path / name)
    assert not any(module.startswith(str(tmp_path)) for module in sys.modules)


def observer(argument):
    def ktforge_planned(plan):
        raise ValueError("no plan of mine")

    def ktforge_unit_written(spec, bytes):
        raise NotImplementedError

    return SimpleNamespace(
        __name__="watcher", **{f.__name__: hookimpl(f) for f in (ktforge_planned, ktforge_unit_written)[: argument + 1]}
    )


def test_an_observer_that_raises_is_named_once_and_stops_nothing(caplog):
    registry = Registry(observer(0))
    for _ in range(2):
        registry.hook.ktforge_planned(plan=None)
    assert caplog.messages == [
        "plugin watcher failed in ktforge_planned (ValueError: no plan of mine), and the conversion goes on: correct it"
    ]


def test_an_installed_observer_that_raises_can_be_turned_off(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "watching", observer(0))
    distributions(monkeypatch, ("watch", "watching", "kt-watch"))
    Registry.installed().hook.ktforge_planned(plan=None)
    (message,) = caplog.messages
    assert message.startswith("plugin watch of kt-watch 1.2 failed ")
    assert message.endswith(": correct it, or turn it off with --block watch or KTFORGE_BLOCK=watch")


def test_an_observer_that_asks_for_what_there_is_not_is_named():
    with pytest.raises(PluginError, match=r"^plugin watcher failed while .*'bytes'.* can not be found[^\n]*$"):
        Registry(observer(1))


def test_a_stage_that_plans_nothing_is_named(source):
    class Lazy(kt_amx.KtAmx):
        name: ClassVar[str] = "lazy"

        def plan(self, spec):
            return None

    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=int4.Int4(), layout=Lazy(), writer=MemoryWriter()
    )
    with pytest.raises(PluginError, match=r"planned NoneType for model\.layers\.0\.mlp\.experts\.0; PackedSpec was"):
        pipeline.plan()


def test_a_preprocessor_that_plans_one_unit_instead_of_a_list_is_named(source):
    class One(MoeToBf16):
        name: ClassVar[str] = "one"

        def plan(self, unit):
            return unit

    pipeline = Pipeline(loader=SafetensorsLoader(path=source), preprocess=[One()], writer=MemoryWriter())
    with pytest.raises(PluginError, match=r"plugin one .*, preprocess\) planned str for \S+; UnitSpec was expected"):
        pipeline.plan()


@pytest.mark.parametrize("shape", [(1.5,), (-4,), [4], ("4",), None])
def test_a_tensor_that_no_file_could_hold_is_the_layouts_mistake(source, shape):
    class Odd(kt_amx.KtAmx):
        name: ClassVar[str] = "odd"

        def plan(self, spec):
            packed = super().plan(spec)
            return packed._replace(tensors=tuple(t._replace(shape=shape) for t in packed.tensors))

    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=int4.Int4(), layout=Odd(), writer=MemoryWriter()
    )
    with pytest.raises(PluginError, match=r"^plugin odd .*, layout\) planned \(.blk\.0\..* of sizes were expected$"):
        pipeline.plan()


def test_a_name_that_is_none_is_the_layouts_mistake(source):
    class Bytes(kt_amx.KtAmx):
        name: ClassVar[str] = "bytes"

        def passthrough(self, tensor):
            return tensor.name.encode()

    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=int4.Int4(), layout=Bytes(), writer=MemoryWriter()
    )
    with pytest.raises(PluginError, match=r"^plugin bytes .*, layout\) planned \(b'.* a name, a numpy dtype"):
        pipeline.plan()


def test_a_hook_need_not_be_a_function():
    module = ModuleType("partly")
    module.ktforge_layouts = hookimpl(partial(list, [kt_amx.KtAmx]))
    assert [e.cls for e in Registry(module).entries()] == [kt_amx.KtAmx]


def test_a_plugin_that_is_not_installed_is_named_by_its_file(source, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from ktforge import hookimpl\nfrom ktforge_plugins import KtAmx\n\n\n"
        "class Mine(KtAmx):\n    name = 'mine'\n\n    def demand(self, unit):\n        raise ValueError('no')\n\n\n"
        "@hookimpl\ndef ktforge_layouts():\n    return [Mine]\n"
    )
    registry = Registry(load_file(file))
    layout = registry.find("layout", "mine").cls()
    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=int4.Int4(), layout=layout, writer=MemoryWriter()
    )
    with pytest.raises(PluginError) as caught:
        pipeline.plan()
    stem = "model.layers.0.mlp.experts.0"
    assert str(caught.value) == f"plugin mine ({file}, layout) failed on {stem}: ValueError: no (mine.py, line 9)"
