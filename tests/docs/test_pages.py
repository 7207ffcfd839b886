"""The reader of pages finds each planted fault."""

import textwrap

import pytest

from docs.pages import Reader

pytestmark = pytest.mark.slow


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a page with this text; the result is the reader."""

    def run(text):
        path = tmp_path / "page.md"
        path.write_text(textwrap.dedent(text))
        reader = Reader(tmp_path, monkeypatch, {50051: 12345})
        reader.read(path)
        return reader

    return run


def test_blocks_share_names_and_outputs_are_compared(read):
    reader = read(
        """\
        <!-- invisible-code-block: python
        import asyncio
        start = 1
        -->

        ```python
        await asyncio.sleep(0)
        print(start, "localhost:50051", 3.14159)
        ```

        ```text
        1 localhost:50051 3.14...
        ```

        ```sh
        export CAMSERVE_WORD=shared
        pip install nothing
        ```

        ```sh
        echo $CAMSERVE_WORD
        ```

        ```text
        shared
        ```

        <!-- skip: next "needs a GPU" -->

        ```python
        raise ValueError
        ```
        """
    )

    assert reader.skipped == ["needs a GPU"]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", r"page.md:5: .*the output is:\n1"),
        ("A page.\n\n```python\n1 / 0\n```\n", "page.md:3: ZeroDivisionError"),
        ("```sh\nfalse\n```\n", "exit code 1 of false"),
        ("```sh\nfalse | cat\n```\n", "exit code 1 of false | cat"),
        ("```sh\ncamserve --versions\n```\n", "no such option"),
        (
            '```sh\ncamserve --versions ||\n  echo "exit code $?"\n```\n\n```text\nexit code 1\n```\n',
            "the output is:\nexit code 2",
        ),
        ("```sh\ncamserve-server serve --model none --metrics-address 9464\n```\n", "none"),
        ('<!-- skip: next "r" -->\n\n```python\nif\n```\n', "invalid syntax"),
        ('<!-- skip: next "r" -->\n\n```sh\ncamserve explain a.jpg --colour jet\n```\n', "no option --colour"),
        ('<!-- skip: next "r" -->\n\n```sh\nA=1 camserve-server serv \\\n  --model a\n```\n', "no command serv"),
    ],
)
def test_fault_of_a_block_is_found(read, page, fault):
    with pytest.raises((AssertionError, SyntaxError), match=f"(?is){fault}"):
        read(page)
