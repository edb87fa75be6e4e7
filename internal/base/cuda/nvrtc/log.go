// Package nvrtc compiles CUDA C++ to machine code of one architecture with NVIDIA's run time compiler, and keeps the
// results on disk. It needs neither a driver nor a GPU, so that any machine can compile every kernel. It loads the
// library on first use. Without the build tag cuda only the parser of the assembler's log remains.
package nvrtc

import (
	"regexp"
	"strconv"
	"strings"
)

// Usage is a kernel's share of an SM, from the assembler's --ptxas-options=-v.
type Usage struct {
	Kernel    string
	Registers int // of a thread
	Stack     int // bytes of local memory of a thread
	Spilled   int // bytes stored and loaded for want of registers, summed over the code
	Shared    int // bytes of static shared memory of a block
}

var (
	usageOf    = regexp.MustCompile(`(?:Compiling entry function|Function properties for) '?([\w$]+)'?`)
	usageStack = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usageRegs  = regexp.MustCompile(`Used (\d+) registers`)
	usageSmem  = regexp.MustCompile(`(\d+) bytes smem`)
)

// ParseUsage reads the kernels of a log, in its order.
func ParseUsage(log string) []Usage {
	var all []Usage
	entry := false // the log is at a kernel and not at a function that it calls
	for line := range strings.Lines(log) {
		if m := usageOf.FindStringSubmatch(line); m != nil {
			if strings.Contains(line, "Compiling entry function") {
				all = append(all, Usage{Kernel: m[1]})
			}
			entry = len(all) > 0 && all[len(all)-1].Kernel == m[1]
		}
		if len(all) == 0 {
			continue
		}
		u := &all[len(all)-1]
		if m := usageStack.FindStringSubmatch(line); m != nil {
			// What a function that is not inlined spills counts with its caller.
			u.Stack += number(m[1])
			u.Spilled += number(m[2]) + number(m[3])
		}
		if m := usageRegs.FindStringSubmatch(line); m != nil && entry {
			u.Registers = number(m[1])
			if m := usageSmem.FindStringSubmatch(line); m != nil {
				u.Shared = number(m[1])
			}
		}
	}
	return all
}

func number(s string) int {
	n, _ := strconv.Atoi(s) // the pattern has digits only
	return n
}

// slow are the remarks of the assembler about wgmma instructions that it serialises and about
// register counts that it ignores: C7508, C7510 and their relatives.
var slow = regexp.MustCompile(`\(C75\d\d\)|Potential Performance Loss|setmaxnreg ignored|'setmaxnreg' ignored`)

// Warnings returns the lines of a log that complain, with the assembler's remarks about code that
// is needlessly slow among them.
func Warnings(log string) []string {
	var all []string
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, "warning") || slow.MatchString(line) {
			all = append(all, line)
		}
	}
	return all
}
