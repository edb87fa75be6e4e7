package place

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Bounds of a host list. Slurm allows 64K hosts in a range.
const (
	maxHosts    = 64 << 10
	maxHostList = 1 << 20 // bytes of its text
	maxHostName = 255     // bytes, as in DNS
	maxDigits   = 18      // of a number in brackets, so that it fits 64 bits
	maxTasks    = 1 << 20
)

var (
	errTooMany  = fmt.Errorf("it contains more than %d hosts", maxHosts)
	errHostList = errors.New("want names with numbers in brackets, such as node[01-03,07]")
)

// hostTerm matches the first name of a list: printable characters, and brackets.
var hostTerm = regexp.MustCompile(`^(?:[!-+\--Z\\^-~]|\[[0-9,-]+\])+`)

// Hosts expands a host list of Slurm, such as node[01-03,07],login1. It keeps order and duplicates, like `scontrol show
// hostnames`.
func Hosts(list string) (hosts []string, err error) {
	if len(list) > maxHostList {
		return nil, fmt.Errorf("a host list of %d bytes; at most %d are read", len(list), maxHostList)
	}
	for rest := list; ; {
		if rest = strings.TrimLeft(rest, ", \t\n"); rest == "" {
			return hosts, nil
		}
		term := hostTerm.FindString(rest)
		if rest = rest[len(term):]; term == "" {
			err = errHostList
		} else {
			hosts, err = expand(hosts, term)
		}
		if err != nil {
			return nil, fmt.Errorf("host list %s: %w", terminal.Name(list), err)
		}
	}
}

// expand appends the hosts of a term, such as a[1-2]b[3-4].
func expand(hosts []string, term string) ([]string, error) {
	text := strings.Split(strings.ReplaceAll(term, "]", "["), "[") // names and numbers in turn
	numbers := make([][]string, len(text)/2)
	count := 1
	for i := range numbers {
		var err error
		if numbers[i], err = expandNumbers(text[2*i+1]); err != nil {
			return nil, err
		}
		if count *= len(numbers[i]); count > maxHosts {
			return nil, errTooMany
		}
	}
	for at := range count {
		// In Slurm's order the last bracket changes fastest, then the first, the second and so on.
		for i := range numbers {
			j := (i + len(numbers) - 1) % len(numbers)
			text[2*j+1] = numbers[j][at%len(numbers[j])]
			at /= len(numbers[j])
		}
		name := strings.Join(text, "")
		if len(name) > maxHostName {
			return nil, fmt.Errorf("a name of %d bytes; a host has at most %d", len(name), maxHostName)
		}
		if len(hosts) == maxHosts {
			return nil, errTooMany
		}
		hosts = append(hosts, name)
	}
	return hosts, nil
}

// expandNumbers expands the numbers in brackets. A range keeps the digits of its first number.
func expandNumbers(text string) (numbers []string, err error) {
	for entry := range strings.SplitSeq(text, ",") {
		lo, hi, isRange := strings.Cut(entry, "-")
		if !isRange {
			hi = lo
		}
		first, err1 := digits(lo)
		last, err2 := digits(hi)
		if err1 != nil || err2 != nil || last < first {
			return nil, fmt.Errorf("[%s]: %w", terminal.Clip(text, 40), errHostList)
		}
		if last-first >= uint64(maxHosts-len(numbers)) {
			return nil, errTooMany
		}
		for n := first; n <= last; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(lo), n))
		}
	}
	return numbers, nil
}

func digits(text string) (uint64, error) {
	if len(text) > maxDigits {
		return 0, strconv.ErrRange
	}
	return strconv.ParseUint(text, 10, 64)
}

// Counts expands Slurm's tasks per node, such as 2(x3),1.
func Counts(text string) (counts []int, err error) {
	sum := 0
	for entry := range strings.SplitSeq(text, ",") {
		number, repeat, repeated := strings.Cut(strings.TrimSuffix(entry, ")"), "(x")
		if !repeated {
			repeat = "1"
		}
		n, err := digits(number)
		times, _ := digits(repeat) // 0 on an error
		if err != nil || repeated != strings.HasSuffix(entry, ")") || times < 1 ||
			times > uint64(maxHosts-len(counts)) || n > uint64(maxTasks-sum)/times {
			return nil, fmt.Errorf("tasks on the nodes %s: want counts such as 2(x3),1, of at most %d nodes and %d tasks",
				terminal.Name(terminal.Clip(text, maxText)), maxHosts, maxTasks)
		}
		for range times {
			counts = append(counts, int(n))
		}
		sum += int(n * times)
	}
	return counts, nil
}
