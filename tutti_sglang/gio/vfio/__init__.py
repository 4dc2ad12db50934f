"""A real NVMe drive driven from user space: VFIO, the IOMMU, the controller, and what to know before it is used."""
