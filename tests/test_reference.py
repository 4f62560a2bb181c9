"""The reference: every public name is on a page of docs/api, with all its parameters, and the examples run."""

import ast
import doctest
import re
from pathlib import Path
from pkgutil import resolve_name

import griffe
import pytest

import sepsa

ROOT = Path(__file__).parents[1]
PUBLIC = ["sepsa.interfaces.keyed.KeyedLearner", "sepsa.testing.check_solver"]
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
WIDEST = 82  # characters of code that a page shows at 1,280 pixels without scrolling
# Methods that another library calls and documents.
NOT_OURS = {"extra_repr"}


@pytest.fixture(scope="module")
def package():
    """The package as mkdocstrings reads it, without importing it: some modules need an engine."""
    return griffe.load("sepsa", search_paths=[str(ROOT / "src")], docstring_parser="google", resolve_aliases=True)


def find(package, name):
    found = package[name.removeprefix("sepsa.")]
    found = found[found.name] if found.is_module else found  # `observe` is a package too
    return found.final_target if found.is_alias else found


def source(module):
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8")).body


def of_engines():
    """Yield the functions and classes of all adapters, which the page shows by their package."""
    for path in sorted((ROOT / "src" / "sepsa" / "engines").glob("[a-z]*.py")):
        module = f"sepsa.engines.{path.stem}"
        yield from (
            f"{module}.{node.name}"
            for node in source(module)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        )


def names_on(page):
    """Yield what a page of docs/api has entries for."""
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE):
        yield from of_engines() if name == "sepsa.engines" else [name]


PAGES = {page.stem: list(names_on(page)) for page in sorted((ROOT / "docs" / "api").glob("*.md"))}


def public():
    """Yield the public names: those of `__all__`, those behind the extra `stream`, and those of the engines."""
    for module in ("sepsa", "sepsa.heads", "sepsa.river", "sepsa.checkpoint"):
        (names,) = (
            ast.literal_eval(node.value)
            for node in source(module)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        yield from (f"{module}.{name}" for name in names if name != "__version__")
    yield from of_engines()
    yield from (f"sepsa.{name}" for name in sepsa._STREAM)
    yield from PUBLIC


def described(shown, kind="parameters"):
    """The names that a docstring describes in its sections of this kind."""
    parsed = [] if shown.docstring is None else shown.docstring.parse("google")
    return [item.name for section in parsed if section.kind.value == kind for item in section.value]


def parameters(function):
    return [STARS.get(p.kind, "") + p.name for p in function.parameters if p.name not in ("self", "cls")]


def mistakes(shown):
    """Yield what the entry of a class or function lacks, or describes although it does not exist."""
    if shown.is_function:
        yield from compare(shown.path, parameters(shown), described(shown))
        return
    if shown.docstring is None:
        yield f"{shown.path} has no docstring"
    if "__init__" in shown.all_members:
        made = shown.all_members["__init__"]
        made = made.final_target if made.is_alias else made
        fields = [field.name for field in made.parameters if field.docstring]  # of a dataclass
        # A class that inherits its constructor has the options of the class that defines it.
        yield from compare(shown.path, parameters(made), fields or described(made.parent) + described(made))
    elif any(str(base) == "NamedTuple" for base in shown.bases):
        fields = [name for name, member in shown.members.items() if "property" not in member.labels]
        yield from compare(shown.path, fields, described(shown, "attributes"))
    for name, member in shown.all_members.items():
        method = member.final_target if member.is_alias else member
        if not method.is_function or name.startswith("_") or name in NOT_OURS:
            continue
        if method.docstring is None:
            yield f"{shown.path}.{name} has no docstring, so the page does not show it"
        yield from compare(f"{shown.path}.{name}", parameters(method), described(method))


def compare(name, existing, told):
    if existing != told:
        yield f"{name} has the parameters {existing}, and its docstring describes {told}"


def test_every_public_name_has_an_entry(package):
    entries = {find(package, name).path for names in PAGES.values() for name in names}
    found = list(public())
    assert len(found) > 50
    assert [name for name in found if find(package, name).path not in entries] == []


@pytest.mark.parametrize("page", [page for page, names in PAGES.items() if names])
def test_every_entry_describes_the_parameters_of_the_signature(package, page):
    assert [mistake for name in PAGES[page] for mistake in mistakes(find(package, name))] == []


def test_no_example_is_wider_than_the_page(package):
    entries = [find(package, name) for names in PAGES.values() for name in names]
    wide = [
        line.strip()
        for entry in entries
        for line in entry.docstring.value.splitlines()
        if len(line.strip()) > WIDEST and line.strip().startswith((">>>", "..."))
    ]
    assert wide == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("cli", "engines")])
def test_the_examples_of_a_page_give_what_they_say(page):
    examples = [
        test
        for name in PAGES[page]
        for test in doctest.DocTestFinder().find(resolve_name(name), name, module=False, globs={})
        if test.examples
    ]
    assert examples
    for test in examples:
        found = []
        doctest.DocTestRunner(verbose=False).run(test, out=found.append)
        assert not found, "".join(found)
