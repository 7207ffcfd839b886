"""The checks of sizes, names and texts find each planted fault, and nothing in text without one."""

import pytest
from tools import check_style

LONG_FUNCTION = "def long():\n" + "    x = 1\n" * check_style.FUNCTION_LINES
LONG_CLASS = "class Long:\n" + "    x = 1\n" * check_style.CLASS_LINES
MANY_MEDIUM = "".join(f"def f{n}():\n" + "    x = 1\n" * check_style.MEDIAN_LINES for n in range(3))
FAULTS = {
    "long function": ("service/camserve_server/a.py", LONG_FUNCTION, "long has 41 lines, and 40 is the limit"),
    "long class": ("service/camserve_server/a.py", LONG_CLASS, "Long has 201 lines, and 200 is the limit"),
    "median": (
        "service/camserve_server/a.py",
        MANY_MEDIUM,
        f"the median function has {check_style.MEDIAN_LINES + 1} lines",
    ),
    "old class": ("service/camserve_server/a.py", "class Fleet:\n    pass\n", "Fleet is a name that was replaced"),
    "old function": ("tests/a.py", "async def _bury():\n    pass\n", "_bury is a name that was replaced"),
    "old constant": ("tests/a.py", "PATIENCE: float = 1.0\n", "PATIENCE is a name that was replaced"),
    "old module": ("benchmarks/company.py", "", "company is a name that was replaced"),
    "long test name": (
        "tests/test_a.py",
        f"def test_{'a' * 75}():\n    pass\n",
        "has 80 characters, and 79 is the limit",
    ),
    "docstring": ("tests/a.py", '"""What is made of files."""\n', "does not begin with what this is or does"),
    "attribute": (
        "tests/a.py",
        'class A:\n    """A.\n\n    Attributes:\n        b: one.\n        c: two.\n    """\n\n    b: int\n',
        "A has no attribute c, which its docstring describes",
    ),
    "phrase": ("tests/a.py", '"""Return it; it is told later."""\n', "say it plainly: is told"),
    "phrase in a document": ("docs/a.md", "There may be so many.\n", "say it plainly: so many"),
    "long README": ("README.md", "a\n" * 201, "201 lines, and 200 is the limit"),
}
DOCSTRING = '    """Do it.\n' + "\n    Details.\n" * check_style.FUNCTION_LINES + '    """\n'
SOUND = f"class Short:\n{DOCSTRING}" + "    x = 1\n" * (check_style.CLASS_LINES - 1)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(check_style, "ROOT", tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return [tmp_path / name]

    return write


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(project, fault):
    name, text, message = FAULTS[fault]

    assert any(message in found for found in check_style.faults(project(name, text)))


def test_text_within_the_limits_has_no_fault(project):
    text = '"""Queue of requests."""\n' + SOUND + f"def f():\n{DOCSTRING}    x = 1\n" * 3

    assert list(check_style.faults(project("service/camserve_server/a.py", text))) == []


def test_generated_code_is_not_checked(project):
    assert (
        list(check_style.faults([path.parent for path in project("clients/a_pb2.py", "class Fleet:\n    pass\n")]))
        == []
    )
