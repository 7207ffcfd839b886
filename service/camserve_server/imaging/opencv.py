"""OpenCV, set up before anybody can use it: `from camserve_server.imaging.opencv import cv2`.

Importing it changes three things for the whole process: a picture of more than 2^28 pixels is refused by OpenCV itself,
OpenCV computes on the calling thread only, and it writes no log.
"""

import os

# OpenCV reads this once, when it is loaded. `images` checks each header against the configured limits first; this is
# the net below it, and the square of the largest side that is accepted by default.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**28))

import cv2

# Photos are decoded and drawn on a pool of threads, one photo each: more threads would fight over the cores.
cv2.setNumThreads(1)
# Every broken photo would write lines into the server's log; what is wrong is in the reply.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

__all__ = ["cv2"]
