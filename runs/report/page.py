"""The page: its sections, put into template/page.html with the style sheet and the scripts."""

import base64
import hashlib
from pathlib import Path

import jinja2
from markupsafe import Markup

from runs.report.blocks import Section

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("kernel.js", "view.js")


def script() -> str:
    """The page's script, as the files are."""
    return "\n".join((TEMPLATE / name).read_text().replace('"use strict";\n', "") for name in SCRIPTS)


def policy(code: str) -> str:
    """The content security policy: nothing is fetched, no form is sent, and no other script than `code` runs."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def render(sections: list[Section], summary: str, footer: str) -> str:
    """The page as one HTML text. Everything is escaped but what is Markup already."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    code = '"use strict";\n' + script()
    return environment.get_template("page.html").render(
        sections=sections,
        summary=summary,
        footer=footer,
        policy=policy(code),
        style=Markup((TEMPLATE / "style.css").read_text()),
        script=Markup(code),
    )
