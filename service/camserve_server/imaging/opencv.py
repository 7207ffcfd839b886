"""OpenCV, configured before its first use: `from camserve_server.imaging.opencv import cv2`.

Importing this module changes three things for the whole process. OpenCV itself refuses a picture of more than 2^28
pixels, computes on the calling thread only, and writes no log.
"""

import os

# OpenCV reads this once, when it is loaded. `images` checks each header against the configured limits first. This is a
# second line of defence: the square of the largest side that is accepted by default.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**28))

import cv2

# Photos are decoded and drawn on a pool of threads, one photo per thread: more threads would compete for the cores.
cv2.setNumThreads(1)
# Every broken photo would write lines to the server's log. The error is in the response instead.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

__all__ = ["cv2"]
