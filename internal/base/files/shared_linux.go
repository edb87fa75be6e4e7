//go:build !portable

package files

import "golang.org/x/sys/unix"

// local lists, by number, the file systems that only one kernel writes to.
var local = map[int64]bool{
	unix.EXT4_SUPER_MAGIC: true, unix.XFS_SUPER_MAGIC: true, unix.BTRFS_SUPER_MAGIC: true, unix.TMPFS_MAGIC: true,
	unix.OVERLAYFS_SUPER_MAGIC: true, unix.F2FS_SUPER_MAGIC: true, unix.RAMFS_MAGIC: true,
	unix.BCACHEFS_SUPER_MAGIC: true,
	zfsMagic:                  true,
}

// zfsMagic is the number of ZFS, which is missing in the kernel's headers.
const zfsMagic = 0x2fc12fc1

// Remote reports whether other hosts may write to the file system of a path, or of the nearest existing
// directory above it. It returns false only for file systems that are known to be local.
func Remote(path string) bool {
	st, err := statfs(path)
	return err != nil || !local[int64(st.Type)]
}
