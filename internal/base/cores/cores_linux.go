package cores

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
)

const (
	maxCores = 1024 // of the system's mask; KeepNear does nothing on larger hosts
	maxFile  = 1 << 16
)

const devices = "/sys/bus/pci/devices"

// KeepNear binds all threads of this process, present and future, to those of its cores that are on the NUMA node of a
// PCI device, such as 0000:1b:00.0. It returns these cores. It returns none and does nothing if the node is unknown, or
// all cores are on it, or it has too few of them for the goroutines that run at once.
func KeepNear(device string) (bound []int, err error) { return keepNear(devices, device) }

func keepNear(devices, device string) (bound []int, err error) {
	text, err := files.Read(filepath.Join(devices, device, "local_cpulist"), maxFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a virtual machine or a container without this part of /sys
	}
	var local, own unix.CPUSet
	if err == nil {
		err = parse(&local, string(text))
	}
	if err == nil {
		err = unix.SchedGetaffinity(0, &own)
	}
	if err != nil {
		return nil, fmt.Errorf("cores next to %s: %w", device, err)
	}
	var near unix.CPUSet
	for i := range maxCores {
		if own.IsSet(i) && local.IsSet(i) {
			near.Set(i)
			bound = append(bound, i)
		}
	}
	if near == own || len(bound) < runtime.GOMAXPROCS(0) {
		return nil, nil
	}
	return bound, keep(&near)
}

// parse adds the cores of a kernel's list, such as 0-3,6, to a set.
func parse(set *unix.CPUSet, list string) error {
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.Atoi(first)
		b, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || a < 0 || b >= maxCores {
			return fmt.Errorf("the kernel's list of cores is %q", strings.TrimSpace(list))
		}
		for i := a; i <= b; i++ {
			set.Set(i)
		}
	}
	return nil
}

// keep binds all threads. A thread inherits the cores of its creator, so the first pass that finds no new thread is the
// last.
func keep(set *unix.CPUSet) error {
	seen := map[string]bool{}
	for fresh := true; fresh; {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		fresh = false
		for _, t := range threads {
			if seen[t.Name()] {
				continue
			}
			seen[t.Name()], fresh = true, true
			id, err := strconv.Atoi(t.Name())
			if err == nil {
				err = unix.SchedSetaffinity(id, set)
			}
			if err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
				return fmt.Errorf("thread %s: %w", t.Name(), err)
			}
		}
	}
	return nil
}
