"""Motion that is seen in pictures, without any network."""

import numpy as np
from scipy import ndimage


def shift(before, after, farthest=10):
    """Pixels by which the content of picture `after` [H, W, 3] lies to the right of `before`: best match, blurred."""
    before, after = (np.asarray(ndimage.gaussian_filter(picture, (1.5, 1.5, 0))) for picture in (before, after))
    width = before.shape[1]

    def error(pixels):
        left, right = max(0, -pixels), max(0, pixels)
        return np.square(before[:, left : width - right] - after[:, right : width - left]).mean()

    return min(range(-farthest, farthest + 1), key=error)
