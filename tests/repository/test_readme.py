"""README.md from the first notebook: what is dropped, kept and relinked."""

import nbformat
import nbformat.v4 as nbf
import pytest
import readme


@pytest.fixture
def page(tmp_path):
    "Render a notebook made of cells."

    def render(*cells):
        nbformat.write(nbf.new_notebook(cells=list(cells)), tmp_path / "index.ipynb")
        return readme.render(tmp_path / "index.ipynb")

    return render


def code(source, **data):
    return nbf.new_code_cell(source, outputs=[nbf.new_output("execute_result", data)] if data else [])


def test_directives_and_hidden_cells_go(page):
    text = page(code("#| hide\nsecret = 1"), code("#| default_exp index"), code("#| eval: false\nshown = 2"))[
        "README.md"
    ].decode()
    assert "secret" not in text and "default_exp" not in text and "#|" not in text
    assert "```python\nshown = 2\n```" in text


def test_echo_false_keeps_the_output_alone(page):
    text = page(code("#| echo: false\nprint('source')", **{"text/markdown": "| a | b |"}))["README.md"].decode()
    assert "| a | b |" in text and "source" not in text and "```" not in text


def test_links_move_with_the_page(page):
    text = page(
        nbf.new_markdown_cell("[arrays](data/01_arrays.ipynb) [law](../LICENSE) [web](https://example.org) [here](#x)")
    )["README.md"].decode()
    assert "(nbs/data/01_arrays.ipynb) [law](LICENSE) [web](https://example.org) [here](#x)" in text


def test_pictures_become_files(page):
    files = page(code("draw()", **{"image/png": "iVBORw0KGgo="}))
    (name,) = set(files) - {"README.md"}
    assert (
        name.startswith("README_files/")
        and f"]({name})" in files["README.md"].decode()
        and files[name].startswith(b"\x89PNG")
    )
