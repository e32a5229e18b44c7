# needs: aiperf
# aiperf's quick start: a profile of a streamed chat endpoint, and its report.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
url=${OPENAI_BASE_URL%/v1}
aiperf profile --model hemiola --url "$url" --endpoint-type chat --endpoint /v1/chat/completions --streaming \
    --tokenizer "$TOKENIZER" --request-count 8 --concurrency 2 \
    --synthetic-input-tokens-mean 40 --output-tokens-mean 16 --ui none --artifact-dir "$folder" > "$folder/log" 2>&1 \
    || { tail -n 40 "$folder/log"; exit 1; }
python - "$folder/profile_export_aiperf.json" <<'PYTHON'
import json, sys

report = json.load(open(sys.argv[1]))
assert report["request_count"]["avg"] == 8, report.get("request_count")
print("8 requests, time to first token", round(report["time_to_first_token"]["avg"], 1), "ms on average")
PYTHON
