"""Working memory: a failed allocation leaves the kernels usable."""

import subprocess
import sys

CODE = """
import resource, torch
from specdec_kernels import SamplingTensors, nucleus
torch.set_num_threads(1)
params = SamplingTensors.create(temperature=0.8, top_p=0.9, seed=1)
small = torch.randn(1, 5000)
before = nucleus(small, params, backend="native")
wide = torch.zeros(1, 2**27, dtype=torch.bfloat16)  # its scratch needs over 2 GB
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.RLIM_INFINITY))
try:
    nucleus(wide, params, backend="native")
except (MemoryError, RuntimeError):
    print("refused")
for _ in range(20):
    after = nucleus(small, params, backend="native")
    assert all(torch.equal(a, b) for a, b in zip(before, after))
print("same")
"""


def test_failed_allocation_leaves_scratch_usable(native):
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "same"], (done.returncode, done.stderr[-2000:])
