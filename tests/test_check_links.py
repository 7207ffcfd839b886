"""The check of links finds each planted fault."""

import pytest
from tools import check_links


@pytest.fixture
def folder(tmp_path):
    """A folder with two pages whose links are right."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[a](docs/a.md#one-two-and-three) [web](https://example.com) `[no](link.md)`\n")
    (tmp_path / "docs" / "a.md").write_text("# A\n## One, `two` and [three](../README.md)\n\n```md\n[no](x.md)\n```\n")
    return tmp_path


def test_right_links_pass(folder, capsys):
    assert check_links.main(folder) == 0
    assert capsys.readouterr().out == "the links of 2 files lead to files and headings\n"


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("b.md", "b.md: no such file"),
        ("../docs/a.md#two", "../docs/a.md#two: no such heading"),
        ("#b", "#b: no such heading"),
        ("../README.md#a", "../README.md#a: no such heading"),
    ],
)
def test_link_that_leads_nowhere_is_found(folder, capsys, link, fault):
    with (folder / "docs" / "a.md").open("a") as page:
        page.write(f"[wrong]({link})\n")

    assert check_links.main(folder) == 1
    assert capsys.readouterr().out == f"docs/a.md: {fault}\n"
