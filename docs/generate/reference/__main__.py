"""Write the generated parts of the reference pages. Usage: `PYTHONPATH=docs/generate python -m reference`."""

from reference import FOLDER, PARTS, generated

for page in PARTS:
    text = generated(page)
    (FOLDER / f"{page}.md").write_text(text, encoding="utf-8")
