package cost

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/files"
)

//go:embed tables/*.json
var shipped embed.FS

// Shipped returns the tables of reference machines, by file name. All callers share them.
var Shipped = sync.OnceValues(func() (all []*Table, err error) {
	entries, err := shipped.ReadDir("tables")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, err := shipped.ReadFile("tables/" + e.Name())
		if err != nil {
			return nil, err
		}
		t, err := Decode(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name(), err)
		}
		all = append(all, t)
	}
	return all, nil
})

// Path returns the file of the user's own table of a machine. It holds for every build that reads its format.
func Path(m Machine) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	count := m.Cores
	if m.Arch != 0 {
		count = m.Count
	}
	return filepath.Join(cache, "cprun", "cost", fmt.Sprintf("v%d", Version),
		clean(fmt.Sprintf("%s-%d", m.Device, count))+".json"), nil
}

func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '.', r == '-', r == '+':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return '-'
	}, s)
	return strings.TrimLeft(s[:min(len(s), 100)], ".")
}

// Own returns the table that the user has measured on a machine; nil: there is none. The
// table of as many GPUs is best; one of one GPU will do if it knows of links.
func Own(m Machine) (*Table, error) {
	path, err := Path(m)
	if err != nil {
		return nil, nil // a user without a home has no tables
	}
	var t *Table
	text, err := files.Read(path, MaxBytes)
	if err == nil {
		t, err = Decode(text)
	}
	if errors.Is(err, fs.ErrNotExist) && m.Arch != 0 && m.Count != 1 {
		one := m
		one.Count = 1
		if t, err = Own(one); t != nil && len(t.Sets[0].Links) == 0 {
			t = nil // of one GPU, which says nothing of the links between several
		}
		return t, err
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; remove it, or measure again with cprun bench calibrate", path, err)
	}
	return t, nil
}

// Keep stores a table where Own finds it, and returns the path.
func (t *Table) Keep() (string, error) {
	path, err := Path(t.Machine)
	if err != nil {
		return "", err
	}
	dir, err := files.Make(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	defer dir.Close()
	return path, files.Write(dir, filepath.Base(path), t.Encode)
}

// Reference returns the shipped table of the machine that is most like m: of its name, else of its kind, else of the
// nearest architecture. The second result says that it is of that very GPU; the names of processors say too little.
func Reference(m Machine) (*Table, bool, error) {
	all, err := Shipped()
	if err != nil {
		return nil, false, err
	}
	var best *Table
	for _, t := range all {
		if m.Arch != 0 && t.Machine.Device == m.Device && t.Machine.Arch == m.Arch {
			return t, true, nil
		}
		if (t.Machine.Arch == 0) != (m.Arch == 0) {
			continue
		}
		if best == nil || abs(t.Machine.Arch-m.Arch) < abs(best.Machine.Arch-m.Arch) {
			best = t
		}
	}
	return best, false, nil
}

func abs(n int) int { return max(n, -n) }
