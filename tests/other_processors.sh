#!/bin/sh
# Run the numeric tests as on other processors, and print a line for each.
#
#     tests/other_processors.sh        the parity and capture tests
#     tests/other_processors.sh all    all tests of methods and models, the slow ones too
#
# PYTHON names the interpreter, .venv/bin/python if unset. PROCESSORS names the settings to run, one in each line, as
# "ISA of oneDNN, capability of torch's own kernels, threads".
cd "$(dirname "$0")/.." || exit 2
: "${PYTHON:=.venv/bin/python}"
: "${PROCESSORS:=SSE41 default 1
AVX2 avx2 2
AVX512_CORE default 1
DEFAULT default 1
DEFAULT avx2 2}"
[ "$1" = all ] && select= which= || select="parity or capture" which="not slow"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
code=0
while read -r isa capability threads; do
    begin=$(date +%s)
    if ONEDNN_MAX_CPU_ISA=$isa ATEN_CPU_CAPABILITY=$capability OMP_NUM_THREADS=$threads \
        "$PYTHON" -m pytest tests/methods tests/models tests/engine tests/jobs tests/metrics tests/targets -m "$which" -k "$select" -q --timeout=600 >"$log" 2>&1 </dev/null; then
        result=passed
    else
        result=FAILED code=1
        cat "$log"
    fi
    echo "$result ONEDNN_MAX_CPU_ISA=$isa ATEN_CPU_CAPABILITY=$capability OMP_NUM_THREADS=$threads: $(tail -n 1 "$log"), $(($(date +%s) - begin)) s"
done <<PROCESSORS
$PROCESSORS
PROCESSORS
exit $code
