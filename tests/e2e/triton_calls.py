"""Send a photo to the model "tiny" 30 times over one connection of tritonclient: `triton_calls.py ADDRESS PHOTO`.

The program prints the number of responses. The tests of balancing run it with a Python that has tritonclient.
"""

import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

address, photo = sys.argv[1:]
image = triton.InferInput("image", (1, 1), "BYTES")
image.set_data_from_numpy(np.array([[Path(photo).read_bytes()]], object))
with triton.InferenceServerClient(address) as client:
    responses = [client.infer("tiny", [image]) for _ in range(30)]
sys.stdout.write(f"{sum(response.as_numpy('label').size for response in responses)}\n")
