"""What `mkdocs` calls while it builds the documentation site (`hooks` of mkdocs.yml)."""

import command_reference
import error_page
from drawings import scrolling_drawings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nav_patterns import expanded
from python_reference import python_reference_pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, then put every page that the navigation does not name at the place of its pattern."""
    pages = {
        command_reference.PAGE: command_reference.command_page(),
        error_page.PAGE: error_page.error_page(),
        **python_reference_pages(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = expanded(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let drawings scroll on narrow screens."""
    return scrolling_drawings(html)
