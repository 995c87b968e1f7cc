"""Every code block of README and documentation works as it is written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from narrowband.cli import main
from tests.docs import commands, pages
from tests.ranks import RankError

PATHS = [
    *(pages.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "reproduce/README.md", "benchmarks/README.md")),
    *sorted((pages.ROOT / "docs").rglob("*.md")),
]
PAGES = [pages.read(path) for path in PATHS]
WITH_PYTHON = [page for page in PAGES if page.runs]
#: What pages import beside this library and what it needs.
TRAINERS = ("accelerate", "lightning", "transformers")
WITH_COMMANDS = [page for page in PAGES if commands.lines(page) or commands.inline(page)]


@pytest.fixture
def run_main(capsys, monkeypatch):
    """Run a command line of narrowband; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(words):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order_and_then_its_commands(page, tmp_path, monkeypatch, run_main):
    lacking = [name for name in TRAINERS if page.imports(name) and find_spec(name) is None]
    if lacking:
        pytest.skip(f"{' and '.join(lacking)} not installed: pip install '.[dev]'")
    pages.run(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in commands.lines(page):
        commands.run_quick(line, run_main)


@pytest.mark.thorough
def test_slower_commands_run_with_the_files_of_their_page(tmp_path, monkeypatch, run_main):
    slower = [(page, line) for page in PAGES for line in commands.lines(page) if line.words[1:2] == ["memory"]]
    assert slower
    monkeypatch.chdir(tmp_path)
    for page, line in slower:
        for block in page.blocks:
            if block.title:
                (tmp_path / block.title).write_text(block.text)
        commands.run_quick(line, run_main, commands.SLOWER)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood_by_what_they_call(page, tmp_path):
    for block in page.blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    for line in [*commands.lines(page), *commands.inline(page)]:
        commands.check(line, tmp_path)


def test_every_block_is_in_a_language_that_is_checked():
    others = [
        f"{page.name}:{b.line} {b.language!r}"
        for page in PAGES
        for b in page.blocks
        if b.language not in pages.LANGUAGES
    ]
    assert others == []


def test_scripts_end_their_process_group_or_the_text_beside_them_says_so():
    paths = {
        path for path, page in zip(PATHS, PAGES, strict=True) for b in page.blocks if "init_process_group" in b.text
    }
    assert len(paths) > 10
    assert [path.name for path in sorted(paths) if "destroy_process_group()" not in path.read_text()] == []


def test_hardly_a_block_is_left_out_and_each_says_why():
    left_out = [block for page in PAGES for block in page.blocks if block.not_run]
    assert len(left_out) <= 4
    assert all(len(block.not_run.split()) >= 3 for block in left_out)


# ---- the harness can fail --------------------------------------------------------------------------------------------

SCRIPT = """??? example "The script"

    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ```

"""


def a_page(folder, text):
    path = folder / "page.md"
    path.write_text(text)
    return pages.read(path)


def a_command(text):
    return commands.Line(text, "page.md:1")


def test_a_page_whose_block_raises_on_one_rank_fails_and_names_page_and_line(tmp_path):
    page = a_page(tmp_path, SCRIPT + "```python\nassert dist.get_rank() == 0, 'only rank 1 gets here'\n```\n")
    with pytest.raises(RankError, match=r'(?s)rank 1.*page\.md", line 10.*only rank 1 gets here'):
        pages.run(page, tmp_path)


def test_a_name_that_no_earlier_block_shows_is_an_error(tmp_path):
    page = a_page(tmp_path, "```python\nfirst = 1\n```\n\n<!-- run: 1 rank -->\n```python\nprint(first)\n```\n")
    with pytest.raises(RankError, match="'first' is not defined"):
        pages.run(page, tmp_path)


def test_a_diff_is_run_as_it_is_after_the_change(tmp_path):
    text = "<!-- run: 1 rank -->\n```diff\n a = 1\n-a = a + 1\n+a = a + 2\n\n print(a)  # prints 3\n```\n"
    pages.run(a_page(tmp_path, text), tmp_path)


def test_a_page_that_says_what_is_not_printed_fails(tmp_path):
    page = a_page(tmp_path, "<!-- run: 1 rank -->\n```python\nprint(6 * 7)  # prints 41\n```\n")
    with pytest.raises(AssertionError, match="prints 41"):
        pages.run(page, tmp_path)


def test_a_page_that_shows_another_output_than_its_blocks_print_fails(tmp_path):
    text = "<!-- run: 1 rank -->\n```python\nprint(6 * 7)\n```\n\n<!-- printed: by rank 0 -->\n```text\n{}\n```\n"
    pages.run(a_page(tmp_path, text.format(42)), tmp_path)
    with pytest.raises(AssertionError, match="'41'"):
        pages.run(a_page(tmp_path, text.format(41)), tmp_path)


def test_a_later_run_has_the_script_and_the_files_of_earlier_ones_on_as_many_ranks_as_it_says(tmp_path):
    first = "```python\nopen(f'rank-{dist.get_rank()}', 'w').close()\n```\n"
    second = "```python\nimport os\nprint(dist.get_world_size(), os.path.exists('rank-1'))  # prints 3 True\n```\n"
    page = a_page(tmp_path, SCRIPT + first + "\n<!-- run: 3 ranks -->\n" + second)
    assert [ranks for ranks, _ in page.runs] == [2, 3]
    pages.run(page, tmp_path)


def test_a_block_that_is_not_run_is_compiled_all_the_same(tmp_path):
    page = a_page(tmp_path, "<!-- not run: no machine has one -->\n```python\nthis is no Python\n```\n")
    with pytest.raises(SyntaxError):
        pages.run(page, tmp_path)


@pytest.mark.parametrize("text", ["```python\n1\n", "<!-- run: many ranks -->\n"])
def test_what_cannot_be_read_is_an_error_that_names_the_line(text, tmp_path):
    with pytest.raises(ValueError, match=r"page\.md:1"):
        a_page(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("narrowband bench ddp --no-such-option", "no-such-option"),
        ("narrowband forecast", "unknown command 'forecast'"),
        ("narrowband lab --nodes 4 -- python nowhere.py", "no nowhere.py"),
        ("python -m reproduce.dgc --no-such-option", "no-such-option"),
        ("python -m reproduce.nothing", "no module reproduce.nothing"),
        ("torchrun --nproc-per-node 2 nowhere.py", "no nowhere.py"),
        ("make coffee", "coffee"),
        ("pip install '.[coffee]'", "no extra coffee"),
        ("pip install narrowband", "another project's"),
        ("torchrun --no-such-option train.py", "no-such-option"),
        ("frobnicate", "nobody knows 'frobnicate'"),
    ],
)
def test_a_command_that_does_not_work_is_an_error_that_names_it(text, complaint, tmp_path):
    with pytest.raises(commands.CommandError, match=complaint):
        commands.check(a_command(text), tmp_path)


def test_a_sentence_may_warn_of_the_other_library_but_not_recommend_it(tmp_path):
    commands.check(commands.Line("pip install narrowband", "page.md:1", block=False), tmp_path)
    with pytest.raises(commands.CommandError, match="another project's"):
        commands.check(commands.Line("pip install 'narrowband[plots]'", "page.md:1", block=False), tmp_path)


def test_a_quick_command_that_fails_is_an_error(run_main):
    with pytest.raises(commands.CommandError, match=r"no-such-file"):
        commands.run_quick(a_command("narrowband adapt no-such-file.pt"), run_main)
