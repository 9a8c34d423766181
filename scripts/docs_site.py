"""A hook of mkdocs: pages from outside docs/, links between all, and public names as mkdocstrings has them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedloom
from fedloom.templating import MARK, TOKENS

ROOT = Path(__file__).parents[1]
# Pages of the site that lie elsewhere in the repository.
OUTSIDE = {
    "papers/index.md": Path("papers/README.md"),
    **{f"papers/{page.parent.name}.md": page.relative_to(ROOT) for page in sorted(ROOT.glob("papers/*/README.md"))},
    **{
        f"papers/{page.parent.name}-appendix.md": page.relative_to(ROOT)
        for page in sorted(ROOT.glob("papers/*/appendix.md"))
    },
    "benchmarks.md": Path("benchmarks/README.md"),
    "contributing.md": Path("CONTRIBUTING.md"),
    "promises.md": Path("SECURITY.md"),
    "changelog.md": Path("CHANGELOG.md"),
}
# What the package's own pages look like, and are known by.
LOOKS = {
    "mark.svg": Path(fedloom.__file__).parent / MARK,
    "stylesheets/tokens.css": Path(fedloom.__file__).parent / TOKENS,
}
PICTURES = sorted(path.relative_to(ROOT) for kind in ("svg", "png") for path in ROOT.glob(f"papers/**/*.{kind}"))
SITE_PATHS = {
    "README.md": "index.md",
    **{str(path): uri for uri, path in OUTSIDE.items()},
    **{str(path): str(path) for path in PICTURES},
}
NAMES = re.compile(r"<!-- made from the source: api -->.*?<!-- end of what is made -->", re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
ROLE = re.compile(r":(class|func|meth|mod):(?=<code>|`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what lies outside docs/."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for uri, path in LOOKS.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in PICTURES:
        files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let links lead inside the site, and mkdocstrings describe the public names of the package."""
    described = "".join(f"::: fedloom.{name}\n\n" for name in fedloom.__all__)
    return LINK.sub(lambda link: _linked(link, page.file.src_uri), NAMES.sub(lambda _: described, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Docstrings name things by roles, which Markdown does not know."""
    return ROLE.sub("", html)


def _linked(link: re.Match[str], page: str) -> str:
    """A link as the site has it; its text alone where it leads to a file that is no page."""
    here = str(OUTSIDE.get(page, Path("docs", page)))
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["path"]))
    uri = target.removeprefix("docs/") if target.startswith("docs/") else SITE_PATHS.get(target)
    if uri is None:
        return link["text"]
    way = posixpath.relpath(uri, posixpath.dirname(page) or ".")
    return f"[{link['text']}]({way}{link['anchor'] or ''})"
