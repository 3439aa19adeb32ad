"""API pages: one for each module, in the groups of the chapters, with the comments behind parameters."""

import ast
import importlib
import inspect
import io
import json
import re
import textwrap
import tokenize


def as_rst(
    text,  # a docstring or comment: plain words, `code` and $formulas$
):  # the same in reStructuredText
    "Escape everything but code and formulas."
    parts = re.split(r"(`[^`]+`|\$[^$\s][^$]*\$)", text)

    def one(part):
        if part[:1] == "`":
            return f"``{part.strip('`')}``"
        if part[:1] == "$":
            return f":math:`{part.strip('$')}`"
        return re.sub(r"([\\*_|`<>])", r"\\\1", part)

    return "\\ ".join(filter(None, map(one, parts))) if len(parts) > 1 else one(text)


def comments(
    source,  # text of a function or class
):  # [(names, comment)]; names "" stands for what is returned, None for a comment behind a signature in one line
    "The comments behind the parameters of a function or of a class's `__init__`, or behind the fields of a dataclass."
    source = textwrap.dedent(source)
    (node,) = ast.parse(source).body
    said = {
        t.start[0]: t.string.lstrip("# ")
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    if isinstance(node, ast.ClassDef):
        fields = [(n.target.id, said[n.lineno]) for n in node.body if isinstance(n, ast.AnnAssign) and n.lineno in said]
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is None:
            return fields
        node = init
    args = [
        *node.args.posonlyargs,
        *node.args.args,
        *filter(None, [node.args.vararg]),
        *node.args.kwonlyargs,
        *filter(None, [node.args.kwarg]),
    ]
    first, last = node.lineno, node.body[0].lineno
    if (args and max(a.lineno for a in args) == first) and first in said:
        return [(None, said[first])]
    found = []
    for line in range(first, last):
        names = ", ".join(a.arg for a in args if a.lineno == line)
        if line in said and (names or line > max([first, *(a.lineno for a in args)])):
            found.append((names, said[line]))
    return found


def explain(app, what, name, obj, options, lines):
    "For autodoc: the docstring as plain text, then a list of parameters; numpydoc docstrings are left to napoleon."
    if re.search(r"^ *-{4,}$", getattr(obj, "__doc__", None) or "", re.M):
        return
    lines[:] = [as_rst(line) for line in lines]
    if what not in ("function", "method", "class"):
        return
    try:
        found = comments(inspect.getsource(obj))
    except (OSError, TypeError):
        return  # a namedtuple has no source
    label = {"": "*returns*", None: "*takes*"}
    if found:
        lines += [
            "",
            ".. container:: docments",
            "",
            *(f"   * {label.get(names, f'``{names}``')}: {as_rst(text)}" for names, text in found),
            "",
        ]


def skip(app, what, name, obj, skip, options):
    "For autodoc: leave out fields, which their class lists, long values, and methods of other libraries."
    if inspect.isroutine(obj) and not (getattr(obj, "__module__", None) or "ega").startswith("ega"):
        return True  # inherited from another library
    if inspect.isclass(obj) or inspect.isroutine(obj) or isinstance(obj, (property, staticmethod, classmethod)):
        return None
    return True if not name.split(".")[-1].isupper() or len(repr(obj)) > 120 else None


def exported(
    path,  # of a notebook
):  # (name of the module it exports or None, its description)
    "The module and the description in the first cells of a notebook."
    head = "\n".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"][:3])
    name, description = (re.search(pattern, head, re.M) for pattern in (r"^#\| default_exp ([\w.]+)", r"^> (.+)$"))
    return name and name[1], description[1]


def chapters(
    root,  # of the repository
):  # {group: [(title, path)]}
    "The table of chapters in docs/index.md."
    section = (root / "docs/index.md").read_text().partition("## The chapters")[2]
    rows = re.findall(r"^\| ([^|]+) \| (\[[^|]+\.ipynb\)[^|]*) \|$", section, re.M)
    return {group: re.findall(r"\[([^\]]+)\]\(\.\./(nbs/[^)]+)\)", links) for group, links in rows}


def modules(
    chapters,  # {group: [(title, path)]}
    root,  # of the repository
):  # {group: [(module, its description, title of its chapter, path of its chapter)]}
    "The modules that the chapters export."
    rows = {group: [(*exported(root / path), title, path) for title, path in of] for group, of in chapters.items()}
    return {group: kept for group, of in rows.items() if (kept := [row for row in of if row[0]])}


NOT_INHERITED = (
    "object, tuple, dict, Exception, Module, Function, BaseEstimator, TransformerMixin, ClassNamePrefixFeaturesOutMixin"
)

TASKS = {
    "Make and store embeddings": (
        "data.embed.embed",
        "data.packs.EmbeddingSet",
        "data.packs.read_pack",
        "data.packs.write_pack",
        "data.arrays.normalize",
        "data.vectors.read_matrix",
        "data.vectors.check_same_order",
    ),
    "Select and fit an adapter": (
        *("estimator.EmbeddingAdapter", "gain.estimate_gain", "cost.estimate_cost", "method.methods.fit_adapter"),
    ),
    "Adapters and closed forms": (
        *(
            f"method.adapters.{name}"
            for name in ("LinearAdapter", "ReleasedEGA", "PaperEGA", "transform", "save_adapter")
        ),
        *(
            f"method.closed_form.{name}"
            for name in ("WCCN", "DiscriminantWhitening", "ClassStatistics", "ValidatedWCCN", "LDAMap", "PCAMap")
        ),
    ),
    "Train": ("method.training.train", "method.losses.supcon"),
    "Evaluate": (
        *(
            "measure.evaluation.evaluate",
            "measure.search.knn",
            "measure.search.ivf_sweep",
            "measure.metrics.lp_at_k",
            "measure.metrics.ar_at_k",
        ),
        *("measure.statistics.bootstrap", "deploy.report.write_report"),
    ),
    "Queries and documents": (
        *(f"data.relevance.{name}" for name in ("read_pairs", "read_beir", "embed_relevance", "RelevanceSet")),
        *(f"pairs.{name}" for name in ("PairAdapter", "evaluate_pairs")),
        "measure.ranking.ranking_metrics",
    ),
    "Other libraries": (
        "deploy.wrappers.AdaptedEmbeddings",
        "deploy.wrappers.AdaptedEmbedding",
        "deploy.wrappers.AdaptedEmbeddingFunction",
    ),
    "Deploy and monitor": (
        "deploy.transform.transform_file",
        "deploy.index.AdaptedIndex",
        "deploy.stores.open_store",
        "deploy.stores.IndexStore",
        "deploy.monitor.Monitor",
    ),
}

# class -> package without which it cannot be used
NEEDS = {
    "deploy.wrappers.AdaptedEmbeddings": "langchain_core",
    "deploy.wrappers.AdaptedEmbedding": "llama_index",
    "deploy.wrappers.AdaptedEmbeddingFunction": "chromadb",
}


def tasks():
    "The main objects of the library by task, as Markdown. Raises AttributeError for one that does not exist."
    lines = ["## By task", "", "| task | objects |", "| --- | --- |"]
    for task, names in TASKS.items():
        for name in names:
            module, _, attribute = name.rpartition(".")
            getattr(importlib.import_module(f"ega.{module}"), attribute)
        links = ", ".join(f"{{py:obj}}`~ega.{name}`" for name in names)
        lines.append(f"| {task} | {links} |")
    return [*lines, ""]


def write(
    folder,  # docs/api
    chapters,  # {group: [(title, path)]}
    root,  # of the repository
):
    "Write the pages whose content changed."
    pages, lists = {}, []
    for group, of in modules(chapters, root).items():
        lists += [
            f"## {group[0].upper()}{group[1:]}",
            "",
            *(f"- [ega.{m}]({m}.md): {description}" for m, description, _, _ in of),
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(m for m, *_ in of),
            "```",
            "",
        ]
        for m, _, title, path in of:
            pages[f"{m}.md"] = (
                f"# ega.{m}\n\nExplained and tested in the chapter [{title}](../../{path}).\n\n"
                f"```{{eval-rst}}\n.. automodule:: ega.{m}\n   :members:\n   :undoc-members:\n"
                f"   :inherited-members: {NOT_INHERITED}\n```\n"
            )
    modules_there = (f.relative_to(root / "ega").with_suffix("") for f in (root / "ega").rglob("[a-z]*.py"))
    if missing := {f"{'.'.join(m.parts)}.md" for m in modules_there} - set(pages):
        raise ValueError(f"no chapter of docs/index.md exports {', '.join(sorted(missing))}")
    pages["modules.md"] = "# API\n\nThe main objects by task, then one page for each module.\n\n" + "\n".join(
        [*tasks(), *lists]
    )
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / name for name in pages}:
        old.unlink()
    for name, text in pages.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def dead_links(
    pages,  # paths of HTML files
):  # [(page, link)]
    "Relative links and sources that lead to no file, or to no id in it."
    ids, dead = {}, []

    def ids_of(path):
        if path not in ids:
            ids[path] = set(re.findall(r'\bid="([^"]+)"', path.read_text()))
        return ids[path]

    for page in pages:
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]+)"', page.read_text()))):
            if re.match(r"[a-z]+:|//|#$|{{", link):  # a template of a report shows its placeholders
                continue
            file, _, anchor = link.partition("#")
            path = (page.parent / file.split("?")[0]).resolve() if file else page
            if not path.is_file() or (anchor and path.suffix == ".html" and anchor not in ids_of(path)):
                dead.append((page, link))
    return dead
