# needs:
# Prometheus' own checker, on the page of a server at work. Debian: apt-get install prometheus
set -euo pipefail
command -v promtool > /dev/null || { echo "skipped: promtool is not installed"; exit 0; }
curl -sf "${OPENAI_BASE_URL%/v1}/metrics" | promtool check metrics
echo "promtool has nothing to say"
