#!/usr/bin/env bash
# Runs the quick tests as other machines would: `make test-matrix ARGS="tests/memory"`.
# No test may depend on how a CPU rounds, on the number of threads, or on which test came before it.
set -uo pipefail
cd "$(dirname "$0")/.."

settings=(
  # A CPU without AVX.
  "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem
   NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR FAISS_OPT_LEVEL=generic"
  # One with AVX2.
  "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell"
  "OMP_NUM_THREADS=2 PYTEST_ADDOPTS=--random-order-seed=1"
  "PYTEST_ADDOPTS=--random-order-seed=2"
)
# A narrower CPU can be played on a wider one only.
if grep -q avx512f /proc/cpuinfo; then
  settings+=("ATEN_CPU_CAPABILITY=avx512 OPENBLAS_CORETYPE=SkylakeX")
fi

failed=()
for setting in "${settings[@]}"; do
  echo "==" $setting
  env OMP_NUM_THREADS=1 $setting "${PYTHON:-python}" -m pytest -m "not slow" "$@" || failed+=("$setting")
done
for setting in "${failed[@]}"; do
  echo "failed:" $setting
done
exit ${#failed[@]}
