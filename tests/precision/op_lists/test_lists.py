"""Files of op lists: what is read, and what is reported of other content."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.cli.main import main
from mprun.config import compose
from mprun.errors import UsageError
from mprun.precision.op_lists import OpLists
from mprun.records.op_list_files import MAX_NAME, Entry, read_list
from mprun.train.assemble.dtype_choices import choose_op_lists
from tests.each import each


def file(content: str | bytes, name: str = "ops.txt") -> Path:
    """A file in the current folder."""
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def names(content: str | bytes, name: str = "ops.txt", kind: str = "lower") -> list[str]:
    """The names read from a file."""
    return [entry.text for entry in read_list(file(content, name), kind)]


def read(path: Path) -> list[Entry] | str:
    """What a file holds, or the error about it."""
    try:
        return read_list(path, "lower")
    except ValueError as error:
        return str(error)


def chosen(*words: str) -> OpLists:
    """The lists of a configuration on a CPU."""
    config = compose(["recipe=mnist", "op_lists=hmp", *words]).config
    found = choose_op_lists(config, torch.device("cpu"), False)
    assert found is not None
    return found


# ---- text ----------------------------------------------------------------------------------------


def test_comments_blank_lines_and_blanks_around_names_are_left_out() -> None:
    content = "# ops\n\n  relu\t \n\t\n   # more\nlinear# no blank before\nmm  # product\n\n \n"
    entries = read_list(file(content), "lower")
    assert entries == [
        Entry("relu", "ops.txt:3"),
        Entry("linear", "ops.txt:6"),
        Entry("mm", "ops.txt:7"),
    ]


@each("suffix", ["txt", "yaml"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(suffix: str) -> None:
    text = "relu\nlinear\n" if suffix == "txt" else "- relu\n- linear\n"
    assert names(b"\xef\xbb\xbf" + text.encode(), f"ops.{suffix}") == ["relu", "linear"]


@each("content", ["", "\n\n", "# nothing\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_empty_list(content: str | bytes) -> None:
    assert names(content) == []
    lists = chosen("op_lists.lower_file=ops.txt")
    assert "lower" not in lists.rules.values()
    assert lists.rules["softmax"] == "fp32"


def test_a_file_takes_the_place_of_the_whole_list_and_of_no_other() -> None:
    shipped = chosen().rules
    file("gelu\n")
    lists = chosen("op_lists.lower_file=ops.txt").rules
    assert {n for n, kind in lists.items() if kind == "lower"} == {"gelu"}
    assert lists.items() - {("gelu", "lower")} == {
        (n, kind) for n, kind in shipped.items() if kind != "lower"
    }


@given(st.lists(st.sampled_from(["relu", "F.linear", "aten::mm.default", "", "#", " # x"])))
def test_names_and_their_lines_survive_any_layout(lines: list[str]) -> None:
    for end in ("\n", "\r\n", "\r"):
        entries = read_list(file(end.join(lines)), "lower")
        expected = [
            Entry(text.strip(), f"ops.txt:{number}")
            for number, text in enumerate(lines, start=1)
            if text and "#" not in text
        ]
        assert entries == expected


@given(st.binary(max_size=60), st.sampled_from(["ops.txt", "ops.yaml", "ops.yml", "ops"]))
def test_any_bytes_are_a_list_or_an_error_that_names_the_file(content: bytes, name: str) -> None:
    found = read(file(content, name))
    if isinstance(found, str):
        assert found.startswith(f"{name}:")
        assert "\n" not in found
    else:
        for entry in found:
            assert entry.text.isprintable()
            assert len(entry.text.split()) == 1
            assert entry.where.startswith(f"{name}:")


# ---- what is no list of names --------------------------------------------------------------------

BROKEN: dict[str, tuple[bytes, str]] = {
    "a NUL": (b"relu\nlin\0ear\n", r"ops\.txt:2: .*is not the name of an op"),
    "a control character": (b"relu\n\x1b[31mlinear\n", r"ops\.txt:2: .*is not the name of an op"),
    "a name with a blank": (b"relu\n\nmatrix multiply\n", r"ops\.txt:3: 'matrix multiply' is no"),
    "no UTF-8": (b"relu\nlinear\nb\xe4d\n", r"ops\.txt:3: not text \(UTF-8\)"),
    "UTF-16": ("relu\nlinear\n".encode("utf-16"), r"ops\.txt:1: not text"),
    "a program": (b"\x7fELF\x02\x01\x01\0\0\0\xff\xfe", r"ops\.txt:1: "),
    "a very long name": (b"a" * (MAX_NAME + 1), r"ops\.txt:1: 'aaa.*\.\.\.' is not the name"),
    "a zero-width blank": ("relu\u200b".encode(), r"ops\.txt:1: "),
}


@each("name", BROKEN)
def test_what_is_no_list_is_reported_with_file_and_line(name: str) -> None:
    content, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as caught:
        read_list(file(content), "lower")
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_the_command_says_it_with_status_2_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file(BROKEN["a program"][0])
    assert main(["recipe=mnist", "op_lists=hmp", "op_lists.fp32_file=ops.txt", "run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert "op_lists.fp32_file: ops.txt:" in error
    assert error.count("\n") == 1
    assert not Path("run").exists()


@each("name", ["missing.txt", "missing.yaml", "no/such/folder.txt"])
def test_a_missing_file_is_reported(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be read: No such file"):
        read_list(Path(name), "lower")
    with pytest.raises(UsageError, match=f"op_lists.lower_file: {name} cannot be read"):
        compose(["recipe=mnist", "op_lists=hmp", f"op_lists.lower_file={name}"])


# ---- YAML ----------------------------------------------------------------------------------------

LISTS = """\
# three lists
lower: [relu, F.linear]
fp32:
  - softmax   # sums
  - log_softmax
promote: []
"""


@each("suffix", ["yaml", "yml"])
def test_a_yaml_list(suffix: str) -> None:
    path = file("- relu\n- F.linear  # a layer\n\n- 'aten::mm.default'\n", f"ops.{suffix}")
    assert read_list(path, "fp32") == [
        Entry("relu", f"ops.{suffix}"),
        Entry("F.linear", f"ops.{suffix}"),
        Entry("aten::mm.default", f"ops.{suffix}"),
    ]
    assert names("[relu, mm]", f"ops.{suffix}") == ["relu", "mm"]


def test_a_yaml_mapping_has_a_list_for_each_kind() -> None:
    assert names(LISTS, "ops.yaml", "lower") == ["relu", "F.linear"]
    assert read_list(Path("ops.yaml"), "fp32") == [
        Entry("softmax", "ops.yaml"),
        Entry("log_softmax", "ops.yaml"),
    ]
    assert read_list(Path("ops.yaml"), "promote") == []
    words = [f"op_lists.{kind}_file=ops.yaml" for kind in ("lower", "fp32", "promote")]
    assert chosen(*words).rules == {
        **dict.fromkeys(("relu", "linear"), "lower"),
        **dict.fromkeys(("softmax", "log_softmax"), "fp32"),
    }


def test_a_yaml_mapping_without_the_list_asked_for_is_reported() -> None:
    with pytest.raises(ValueError, match="it has no 'promote'; legal: a list of names, or"):
        names("lower: [relu]\nfp32: [log]\n", "ops.yaml", "promote")


BROKEN_YAML: dict[str, tuple[str, str]] = {
    "a word": ("relu\n", r"ops\.yaml: not a list of names"),
    "a mapping to a word": ("fp32: [log]\nlower: relu\n", r"ops\.yaml: not a list of names"),
    "a mapping of mappings": ("lower:\n  relu: true\n", r"ops\.yaml: not a list of names"),
    "a list of lists": ("- relu\n- [mm, bmm]\n", r"ops\.yaml: not a list of names"),
    "a truth value": ("- relu\n- no\n", r"ops\.yaml: not a list of names"),
    "an empty name": ("- relu\n- ''\n", r"ops\.yaml: '' is not the name of an op"),
    "an open bracket": ("lower: [relu,\n  mm\nfp32: [log]\n", r"ops\.yaml:\d: .*one op per line"),
    "a NUL": ("- relu\n- m\0m\n", r"ops\.yaml:\d: .*one op per line"),
    "two documents": ("- relu\n---\n- mm\n", r"ops\.yaml:\d: .*one op per line"),
}


@each("name", BROKEN_YAML)
def test_what_is_no_list_in_yaml_is_reported_with_the_file(name: str) -> None:
    content, message = BROKEN_YAML[name]
    with pytest.raises(ValueError, match=message) as caught:
        read_list(file(content, "ops.yaml"), "lower")
    assert "\n" not in str(caught.value)


@each(
    "text",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [ran]]\n",
        "- !!python/object/apply:os.system ['touch ran']\n",
        "lower: !!python/object/apply:os.mkdir [ran]\n",
        "- !!python/object/new:os.system ['touch ran']\n",
        "- !!python/name:os.system relu\n",
    ],
)
def test_tags_of_python_run_no_code(text: str) -> None:
    found = read(file(text, "ops.yaml"))
    assert isinstance(found, str) or [type(x.text) for x in found] == [str]
    assert [p.name for p in Path.cwd().iterdir()] == ["ops.yaml"]


def test_aliases_that_multiply_do_not_fill_the_memory() -> None:
    """The "billion laughs": nine levels of nine references each."""
    lines = ["a0: &a0 [relu]"]
    for i in range(1, 10):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")
    lines.append("lower: *a9")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"ops\.yaml"):
            names("\n".join(lines), "ops.yaml")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# ---- two lists -----------------------------------------------------------------------------------


def test_an_op_in_two_files_is_reported_with_both_places() -> None:
    file("mm\nrelu\n", "lower.txt")
    file("\nlog\nF.relu\n", "fp32.yaml.txt")
    with pytest.raises(UsageError) as caught:
        chosen("op_lists.lower_file=lower.txt", "op_lists.fp32_file=fp32.yaml.txt")
    message = str(caught.value)
    assert "'F.relu' and 'relu', the same op" in message
    assert "lower.txt:2" in message
    assert "fp32.yaml.txt:3" in message


def test_an_op_set_on_one_list_and_shipped_on_another_is_reported_with_both_places() -> None:
    with pytest.raises(UsageError) as caught:
        chosen("op_lists.lower=[mm,div]")
    assert "div" in str(caught.value)
    assert "op_lists=hmp" in str(caught.value)


def test_strict_lists_every_unknown_name() -> None:
    file("relu\nfoo_op\nlineer\n")
    with pytest.raises(UsageError) as caught:
        chosen("op_lists.lower_file=ops.txt", "op_lists.strict=true")
    assert str(caught.value).startswith("op_lists.strict=true: ops.txt:2: no op is named 'foo_op'")
    assert "; ops.txt:3: no op is named 'lineer'; did you mean 'linear'?" in str(caught.value)
