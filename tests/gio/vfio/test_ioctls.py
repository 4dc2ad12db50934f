"""Numbers and structures are those of the kernel's headers."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from tutti_sglang.gio.vfio import ioctls

HEADER = Path("/usr/include/linux/vfio.h")
NAMES = {
    ioctls.GroupStatus: "vfio_group_status",
    ioctls.DeviceInfo: "vfio_device_info",
    ioctls.RegionInfo: "vfio_region_info",
    ioctls.Type1Info: "vfio_iommu_type1_info",
    ioctls.CapHeader: "vfio_info_cap_header",
    ioctls.DmaMap: "vfio_iommu_type1_dma_map",
    ioctls.DmaUnmap: "vfio_iommu_type1_dma_unmap",
    ioctls.IovaRange: "vfio_iova_range",
}
SPELLED = {(ioctls.IovaRange, "last"): "end"}
NEWER = ("VFIO_DEVICE_BIND_IOMMUFD", "VFIO_DEVICE_ATTACH_IOMMUFD_PT")


@pytest.mark.skipif(not HEADER.exists(), reason="no kernel headers: install linux-libc-dev")
def test_they_are_those_of_the_kernels_headers(tmp_path: Path) -> None:
    constants = {name: value for name, value in vars(ioctls).items() if name.startswith("VFIO_") and name not in NEWER}
    lines = [f'printf("{name} %llu\\n", (unsigned long long){name});' for name in constants]
    expected = [f"{name} {value}" for name, value in constants.items()]
    for structure, name in NAMES.items():
        for field, _ in structure._fields_:
            spelled = SPELLED.get((structure, field), field)
            if spelled == "pad":
                continue
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {spelled}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    source = tmp_path / "print.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/vfio.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n}"
    )
    subprocess.run(["gcc", "-o", tmp_path / "print", source], check=True, timeout=120)
    printed = subprocess.run([tmp_path / "print"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.splitlines() == expected


def test_a_call_says_its_own_size() -> None:
    request = ioctls.DmaUnmap(iova=1, size=2)
    with pytest.raises(OSError):
        ioctls.call(0, ioctls.VFIO_IOMMU_UNMAP_DMA, request)
    assert request.argsz == ctypes.sizeof(request)
