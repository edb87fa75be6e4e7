package cores

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

const (
	maxCores = 1024 // of the system's mask; cores beyond are not used
	maxFile  = 1 << 16
)

// Online counts the host's online cores; 0: unknown.
func Online() int {
	text, _ := files.Read("/sys/devices/system/cpu/online", maxFile)
	list, _ := parse(string(text)) // on an error, none
	return len(list)
}

// parse reads a kernel's list of cores, such as 0-3,6.
func parse(list string) (cores []int, err error) {
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.Atoi(first)
		b, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || b >= maxCores {
			return nil, fmt.Errorf("the kernel's list of cores is %q", strings.TrimSpace(list))
		}
		for i := a; i <= b; i++ {
			cores = append(cores, i)
		}
	}
	return cores, nil
}
