"""Decoding, fitting and resizing of pictures."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from wp2_jax.controls import images
from wp2_jax.controls.errors import GeometryError, ImageError

ROLLOUTS = sorted((Path(__file__).parent / "golden").glob("k_*.safetensors"))


def _relative(actual, expected):
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("path", ROLLOUTS, ids=lambda p: p.stem)
def test_published_start_pictures(path):
    golden = load_file(path)
    picture, expected, low = (
        golden[key].transpose(1, 2, 0) for key in ("in.image_float", "out.img_pixel", "out.img_pixel_lr")
    )
    height, width = expected.shape[:2]
    fitted = images.fit_picture(picture * 2 - 1, height, width)
    assert fitted.dtype == np.float32
    assert _relative(fitted, expected) < 1e-6
    assert _relative(images.low_resolution(jnp.asarray(fitted)), low) < 1e-6
    png = io.BytesIO()
    Image.fromarray(golden["in.image_uint8"].transpose(1, 2, 0)).save(png, "png")
    assert _relative(images.load_image(png.getvalue(), height, width), expected) < 1e-6


def test_low_resolution_of_decoded_pictures():
    golden = load_file(ROLLOUTS[0])
    video = golden["out.rgb_first2"].transpose(1, 2, 3, 0)
    low = golden["out.lr_pix_chunk0"].transpose(1, 2, 3, 0)
    assert _relative(images.low_resolution(jnp.asarray(video))[0], low[0]) < 1e-5


def test_cubic_weights_by_hand():
    # Twice the size: output i looks at i/2 - 1/4, so pixel 3 is 7/4, 5/4, 3/4, 1/4 away from outputs 3, 4, 5, 6 and so
    # on back; Keys' kernel with a = -3/4 has exact binary fractions there.
    row = np.eye(8, dtype=np.float32)[3].reshape(1, 8, 1)
    up = images.resize_bicubic(row, 1, 16)[0, :, 0]
    half = [-0.03515625, -0.10546875, 0.26171875, 0.87890625]
    np.testing.assert_array_equal(up, [0, 0, 0, *half, *half[::-1], 0, 0, 0, 0, 0])


def test_bicubic_clamps_taps_and_overshoots():
    step = np.concatenate([-np.ones((1, 4, 1)), np.ones((1, 4, 1))], axis=1)
    up = images.resize_bicubic(step, 1, 16)
    assert up.max() > 1.05 and up.min() < -1.05
    np.testing.assert_allclose(images.resize_bicubic(np.full((3, 1, 3), 0.3), 64, 128), 0.3, rtol=1e-6)


def test_low_resolution_is_bilinear():
    x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 3, 64, 96, 3)), jnp.float32)
    expected = jax.image.resize(x, (2, 3, 16, 24, 3), "linear", antialias=False)
    np.testing.assert_allclose(images.low_resolution(x), expected, atol=1e-6)


@pytest.mark.parametrize("size", [(481, 833, 448, 832), (77, 131, 192, 192), (1, 1, 64, 64)])
def test_equals_torch_at_any_ratio(size):
    torch = pytest.importorskip("torch")
    height, width, new_height, new_width = size
    x = np.random.default_rng(1).uniform(-1, 1, (height, width, 3)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(x.transpose(2, 0, 1)[None].copy()), size=(new_height, new_width), mode="bicubic"
    )
    assert _relative(images.resize_bicubic(x, new_height, new_width), expected[0].numpy().transpose(1, 2, 0)) < 1e-6


def test_low_resolution_stays_float32():
    out = jax.jit(images.low_resolution)(jnp.ones((2, 5, 8, 12, 3), jnp.bfloat16))
    assert out.shape == (2, 5, 2, 3, 3) and out.dtype == jnp.float32
    grad = jax.grad(lambda x: images.low_resolution(x).sum())(jnp.zeros((8, 8, 3)))
    assert grad.sum() == pytest.approx(12)


def test_low_resolution_needs_a_multiple_of_four():
    with pytest.raises(ImageError, match="66x64"):
        images.low_resolution(jnp.zeros((66, 64, 3)))


RED, BLUE = (200, 30, 40), (20, 60, 210)


def _halves(mode="RGB", size=(20, 10)):
    """Left half red, right half blue."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image.convert(mode) if mode != "P" else image.quantize(4)


def _save(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def _assert_halves(picture, tolerance=0.02):
    np.testing.assert_allclose(picture[2:-2, 2], np.tile(np.array(RED) / 255, (len(picture) - 4, 1)), atol=tolerance)
    np.testing.assert_allclose(picture[2:-2, -3], np.tile(np.array(BLUE) / 255, (len(picture) - 4, 1)), atol=tolerance)


@pytest.mark.parametrize(
    ("mode", "name", "tolerance"),
    [
        ("RGB", "a.png", 1e-6),
        ("P", "a.png", 1e-6),
        ("P", "a.gif", 1e-6),
        ("CMYK", "a.jpg", 0.05),
        ("RGBA", "a.png", 1e-6),
    ],
)
def test_modes_become_rgb(tmp_path, mode, name, tolerance):
    picture = images.decode_image(_save(tmp_path, _halves(mode), name))
    assert picture.shape == (10, 20, 3) and picture.dtype == np.float32
    _assert_halves(picture, tolerance)


def test_transparency_is_flattened_on_the_background(tmp_path):
    image = Image.new("RGBA", (8, 8), (*RED, 51))
    path = _save(tmp_path, image, "a.png")
    expected = 0.2 * np.array(RED) / 255 + 0.8 * np.array([0, 1, 0])
    np.testing.assert_allclose(images.decode_image(path, (0, 255, 0))[3, 3], expected, atol=1e-6)
    clear = Image.new("P", (8, 8), 0)
    clear.putpalette([*RED, *BLUE])
    path = _save(tmp_path, clear, "b.png", transparency=0)
    np.testing.assert_array_equal(images.decode_image(path), np.ones((8, 8, 3), np.float32))
    path = _save(tmp_path, Image.new("LA", (8, 8), (100, 0)), "c.png")
    np.testing.assert_array_equal(images.decode_image(path, (0, 0, 0)), np.zeros((8, 8, 3), np.float32))


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = _halves().transpose(Image.Transpose.ROTATE_90)
    path = _save(tmp_path, turned, "a.png", exif=exif)
    picture = images.decode_image(path)
    assert picture.shape == (10, 20, 3)
    _assert_halves(picture, 1e-6)


def test_grey_of_16_bits_keeps_its_depth(tmp_path):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    path = _save(tmp_path, Image.fromarray(values), "a.png")
    picture = images.decode_image(path)
    np.testing.assert_allclose(picture, np.repeat(values[:, :, None] / 65535, 3, 2), atol=1e-6)
    path = _save(tmp_path, Image.new("L", (4, 4), 51), "b.png")
    np.testing.assert_allclose(images.decode_image(path), 0.2, atol=1e-6)


def test_first_frame_of_an_animation(tmp_path):
    frames = [_halves(), Image.new("RGB", (20, 10), (0, 255, 0))]
    for name in ("a.gif", "a.png"):
        path = _save(tmp_path, frames[0], name, save_all=True, append_images=frames[1:])
        _assert_halves(images.decode_image(path))


def test_broken_pictures_name_the_file(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    for name in ("a.png", "a.jpg"):
        path = _save(tmp_path, noise, name)
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(ImageError, match=name) as error:
            images.decode_image(path)
        assert error.value.kind == "not_decodable"
    for name, content in (("b.png", b"hello"), ("c.png", b""), ("d.jpg", b"\xff\xd8\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=name):
            images.load_image(tmp_path / name, 64, 64)
    for missing in (tmp_path / "absent.png", tmp_path):
        with pytest.raises(ImageError, match=missing.name):
            images.decode_image(missing)
    with pytest.raises(ImageError, match="picture of 5 bytes"):
        images.decode_image(b"hello")


def test_stretch_and_crop(tmp_path):
    path = _save(tmp_path, _halves(size=(90, 160)), "tall.png")
    stretched = images.load_image(path, 64, 128)
    assert stretched.shape == (64, 128, 3)
    np.testing.assert_allclose(stretched[:, 10], np.tile(np.array(RED) / 127.5 - 1, (64, 1)), atol=1e-5)
    # A picture with the model's aspect ratio in its middle: crop finds exactly that part.
    middle = np.random.default_rng(0).uniform(-1, 1, (20, 40, 3)).astype(np.float32)
    for pad in (((30, 30), (0, 0), (0, 0)), ((0, 0), (7, 7), (0, 0))):
        padded = np.pad(middle, pad, constant_values=9.0)
        np.testing.assert_array_equal(images.fit_picture(padded, 64, 128, "crop"), images.fit_picture(middle, 64, 128))
    one = images.load_image(_save(tmp_path, Image.new("RGB", (1, 1), BLUE), "one.png"), 64, 128, "crop")
    np.testing.assert_allclose(one, np.broadcast_to(np.array(BLUE) / 127.5 - 1, one.shape), atol=1e-5)


def test_bad_fit_and_size():
    with pytest.raises(ImageError, match="stretch, crop"):
        images.fit_picture(np.zeros((4, 4, 3), np.float32), 64, 64, "pad")
    with pytest.raises(GeometryError, match="64x64"):
        images.load_image(b"", 65, 64)
