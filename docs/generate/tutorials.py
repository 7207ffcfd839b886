"""Write the pictures of the tutorials, by running their Python blocks as a reader does. Called by `make pictures`.

A page is run in a folder with `cat.jpg`, up to the first server that it starts. Each picture of docs/images/tutorials
that the page shows is a file of the same name that its code has saved.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

PAGES = Path(__file__).parent.parent / "tutorials"
PICTURES = PAGES.parent / "images" / "tutorials"
BLOCK = re.compile(
    r"(<!-- skip: next [^\n]*\n+)?(?:```python\n(.*?)```|<!-- invisible-code-block: python\n(.*?)-->)", re.DOTALL
)


def main() -> None:
    """Write the pictures of all pages that show some."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        names = re.findall(r"\]\(\.\./images/tutorials/([\w-]+\.jpg)\)", page.read_text(encoding="utf-8"))
        if not names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            shutil.copy(PICTURES.parent / "cat.jpg", folder)
            sys.path.insert(0, folder)
            run(page)
            for name in names:
                Image.open(name).save(PICTURES / name, quality=85, optimize=True)
            sys.path.remove(folder)


def run(page: Path) -> None:
    """Run the Python blocks of a page, in order, up to the first server."""
    text = page.read_text(encoding="utf-8").partition("\ncamserve-server serve")[0]
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        if not block[1]:
            code = compile(block[2] or block[3], str(page), "exec")  # its file's path, by which a block finds the page
            exec(code, names)  # noqa: S102 -- the page's own code


if __name__ == "__main__":
    main()
