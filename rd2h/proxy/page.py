"""The status page: one self-contained HTML document that refreshes itself.

It loads nothing from elsewhere. A few lines of script fetch the page again and swap its content,
so that scrolling and selection survive; without script the browser reloads it.

Pure; any thread.
"""

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape

from rd2h.proxy.status import EngineStatus, RequestStatus, Status

__all__ = ["CONTENT_SECURITY_POLICY", "page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem .35rem 0; text-align: left;
  vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
.n { font-variant-numeric: tabular-nums; text-align: right; }
.id { font-family: ui-monospace, monospace; font-size: .85em; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
@media (prefers-color-scheme: dark) { :root { --bad: #ef9a9a; --good: #a5d6a7; } }
"""

_SCRIPT = """
async function refresh() {
  const main = document.querySelector("main");
  try {
    const answer = await fetch(location.href, {headers: {accept: "text/html"}, cache: "no-store"});
    const text = await answer.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    main.replaceChildren(...page.querySelector("main").childNodes);
    main.dataset.refreshes = Number(main.dataset.refreshes || 0) + 1;
  } catch (error) {
    const note = document.querySelector("#stale");
    if (note) note.hidden = false;
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(status: Status) -> str:
    """The report as an HTML document."""
    if status.draining:
        state = '<span class="bad">shutting down</span>'
    elif status.ready:
        state = '<span class="good">ready</span>'
    else:
        state = '<span class="bad">not ready: no engine is in on at least one side</span>'
    hidden = status.requests_in_flight - len(status.requests)
    more = f"<p>and {hidden} more</p>" if hidden else ""
    idle = "" if status.requests else "<p>None.</p>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rd2h proxy</title>
<noscript><meta http-equiv="refresh" content="2"></noscript>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>rd2h proxy: <span id="state">{state}</span></h1>
<p>version {escape(status.version)}, up for {_duration(status.uptime_seconds)}.
<span id="in-flight">{status.requests_in_flight}</span> requests in flight,
<span id="waiting">{status.rendezvous_waiting}</span> rendezvous waiting.</p>
<p id="stale" class="bad" hidden>The proxy does not answer: this is what it said last.</p>
<h2>Engines</h2>
{_table("engines", _ENGINE_HEADS, map(_engine, status.engines))}
<h2>Requests in flight</h2>
{_table("requests", _REQUEST_HEADS, map(_request, status.requests))}
{idle}{more}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


_ENGINE_HEADS = ("side", "engine", "state", "load", "requests", "failures", "last error")
_REQUEST_HEADS = ("id", "endpoint", "waiting for", "age", "rendezvous", "decode", "prefill")
_NUMBERS = frozenset({"load", "requests", "failures", "age"})


def _engine(engine: EngineStatus) -> list[str]:
    state = (
        '<span class="good">in</span>'
        if engine.up
        else f'<span class="bad">out</span>, probed in {engine.next_probe_seconds:.0f} s'
    )
    unit = "tokens" if engine.role == "prefill" else "sequences"
    return [
        escape(engine.role),
        f'<span class="id">{escape(engine.url)}</span>',
        state,
        f"{engine.load} {unit}",
        str(engine.requests),
        str(engine.failures),
        escape(engine.last_error),
    ]


def _request(request: RequestStatus) -> list[str]:
    return [
        f'<span class="id">{escape(request.id)}</span>',
        escape(request.endpoint),
        escape(request.stage),
        _duration(request.age_seconds),
        f"{request.rendezvous} of {request.rendezvous_expected}",
        f'<span class="id">{escape(request.decode)}</span>',
        f'<span class="id">{escape(", ".join(request.prefill))}</span>',
    ]


def _table(name: str, heads: tuple[str, ...], rows: Iterable[list[str]]) -> str:
    def cell(tag: str, head: str, content: str) -> str:
        number = ' class="n"' if head in _NUMBERS else ""
        return f"<{tag}{number}>{content}</{tag}>"

    head_row = "".join(cell("th", head, head) for head in heads)
    body = "\n".join(
        "<tr>" + "".join(cell("td", h, c) for h, c in zip(heads, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table id="{name}"><thead><tr>{head_row}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
