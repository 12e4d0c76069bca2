#!/usr/bin/env bash
# Publish a checkpoint folder with nothing but curl.
#
#   examples/01_curl_push.sh http://127.0.0.1:8700 /checkpoints/step-7 7
#
# Ends with 0 if it was committed. Anything else prints a problem document and ends with 22.
set -euo pipefail
url=$1 folder=$2 step=$3
token=()
if [[ -n ${LIVEWEIGHTS_ADMIN_TOKEN:-} ]]; then
    token=(-H "Authorization: Bearer $LIVEWEIGHTS_ADMIN_TOKEN")
fi
curl --silent --show-error --fail-with-body --max-time 600 "$url/v1/updates?wait=true" \
    "${token[@]}" -H 'Content-Type: application/json' \
    -d "{\"path\": \"$folder\", \"version\": $step}"
