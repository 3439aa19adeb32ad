"""The site, built by `make docs` without a network.

Its source folder is the repository: pages keep their paths, and a link leads on the site where it leads in a clone.
Notebooks are shown with the outputs that are stored in them; nothing is executed."""

import json
import re
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(root), str(root / "docs")]
import api
import mathml
import readme

from ega import __version__

project, author, copyright, version = "ega", "ega authors", "2026, ega authors", __version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "nbs/**.ipynb", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "_*", "docs/_*", "**.egg-info", "**/.ipynb_checkpoints"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_google_docstring = False
suppress_warnings = ["ref.python"]  # fields of the same name in two classes

nb_execution_mode = "off"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
html_math_renderer = "mathml"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False

html_theme = "furo"
html_title = f"ega {version}"
html_static_path, html_css_files, templates_path = ["_static"], ["site.css"], ["_templates"]
html_additional_pages = {"index": "front.html"}  # the root of the site leads to docs/index
html_copy_source = html_show_sphinx = False


def toctrees():
    "A table of contents for each group of chapters."
    return "\n\n".join(
        "\n".join(
            [
                "```{toctree}",
                ":hidden:",
                f":caption: {group[0].upper()}{group[1:]}",
                "",
                *(f"../{path}" for _, path in of),
                "```",
            ]
        )
        for group, of in api.chapters(root).items()
    )


def lowered(
    text,  # Markdown
):  # the same
    "Anchors as the site writes them; Jupyter keeps capitals."
    return re.sub(r"\]\((?![a-z]+:)([^)\s#]*)(#[^)\s]+)\)", lambda m: f"]({m[1]}{m[2].lower()})", text)


def shown(
    cell,  # of a notebook, changed in place
):
    "Formulas in tables; outputs whose source is not shown, which myst-nb would drop; links."
    if cell.cell_type == "markdown":
        cell.source = lowered(cell.source)
    elif not cell.source:
        cell.source, cell.metadata["tags"] = "...", ["remove-input"]
    for out in cell.get("outputs", []):
        if "text/html" in out.get("data", {}):
            out["data"]["text/html"] = mathml.tabled(out["data"]["text/html"])


def read(app, name, source):
    "A notebook without its hidden cells; the first page with the list of chapters."
    if name.startswith("nbs/"):
        import nbformat

        nb = readme.cleaned(nbformat.reads(source[0], 4))
        for cell in nb.cells:
            shown(cell)
        module, _ = api.exported(root / f"{name}.ipynb")
        if module:
            nb.cells.append(
                nbformat.v4.new_markdown_cell(
                    f"The module of this chapter: [ega.{module}]({'../' * name.count('/')}docs/api/{module}.md)."
                )
            )
        source[0] = json.dumps(nb)
    elif name == root_doc:
        source[0] = source[0].replace("<!-- chapters -->", toctrees())


def check(app, error):
    "Check the links between the pages of the built site; a dead one is a warning, and `make docs` fails on warnings."
    from sphinx.util import logging

    if error or app.builder.format != "html":
        return
    pages = [Path(app.outdir, app.builder.get_outfilename(name)) for name in sorted(app.env.found_docs)]
    dead = api.dead_links(pages)
    for page, link in dead:
        logging.getLogger("docs").warning("%s: dead link %s", page.relative_to(app.outdir), link)


def setup(app):
    from pygments.lexers.sql import PostgresLexer

    app.add_lexer("sql", PostgresLexer)  # $1 is no error
    api.write(root / "docs/api", api.chapters(root), root)
    app.add_html_math_renderer("mathml", (mathml.inline, None), (mathml.block, None))
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", api.explain)
    app.connect("autodoc-skip-member", api.skip)
    app.connect("build-finished", check)
