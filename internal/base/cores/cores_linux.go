package cores

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
)

const devices = "/sys/bus/pci/devices"

// KeepNear binds all threads of this process, present and future, to the cores that it has on the NUMA node of a
// PCI device, such as 0000:1b:00.0. It returns these cores. It returns none and does nothing if the node is unknown, or
// all cores are on it, or it has too few of them for the goroutines that run at once.
func KeepNear(device string) (bound []int, err error) { return keepNear(devices, device) }

func keepNear(devices, device string) (bound []int, err error) {
	text, err := files.Read(filepath.Join(devices, device, "local_cpulist"), maxFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a virtual machine or a container without this part of /sys
	}
	var local []int
	if err == nil {
		local, err = parse(string(text))
	}
	if err != nil {
		return nil, fmt.Errorf("cores next to %s: %w", device, err)
	}
	own := Own()
	var near unix.CPUSet
	for _, i := range local {
		if slices.Contains(own, i) {
			near.Set(i)
			bound = append(bound, i)
		}
	}
	if len(bound) == len(own) || len(bound) < runtime.GOMAXPROCS(0) {
		return nil, nil
	}
	return bound, keep(&near)
}

// Own lists the cores that this process may use, or nil if they are unknown.
func Own() (own []int) {
	var set unix.CPUSet
	_ = unix.SchedGetaffinity(0, &set) // on an error, none
	for i := range maxCores {
		if set.IsSet(i) {
			own = append(own, i)
		}
	}
	return own
}

// Pin binds all threads of this process, present and future, to one core.
func Pin(core int) error {
	var set unix.CPUSet
	set.Set(core)
	return keep(&set)
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
			id, _ := strconv.Atoi(t.Name()) // always a number
			err := unix.SchedSetaffinity(id, set)
			if err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
				return fmt.Errorf("thread %s: %w", t.Name(), err)
			}
		}
	}
	return nil
}
