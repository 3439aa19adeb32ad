"""Formulas as MathML, which browsers draw themselves: no script and no font is fetched."""

import re

from docutils import nodes
from latex2mathml.converter import convert


def inline(self, node):
    "Visit a formula in a line."
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(self, node):
    "Visit a formula of its own; wide ones scroll."
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def tabled(html):
    "A table that a notebook shows, with the formulas in its cells."

    def cell(m):
        return re.sub(r"\$([^$]+)\$", lambda formula: convert(formula[1]), m[0])

    return re.sub(r"<t[hd][^>]*>[^<]*</t[hd]>", cell, html)
