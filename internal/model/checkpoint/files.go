package checkpoint

import (
	"cmp"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
)

const latestName = "latest"

// dirName returns the directory of a step.
func dirName(step int64) string { return fmt.Sprintf("step-%08d", step) }

// A checkpoint set aside while another of the same step takes its place is called
// step-00000100.old-<run>. It counts as one until that is done, so that a crash in between
// costs nothing.
var dirPattern = regexp.MustCompile(`^step-(\d{8,18})(\.old-[A-Za-z0-9_-]+)?$`)

// A found is a directory that is named as a checkpoint is.
type found struct {
	name string
	step int64
	old  bool
}

// list gives the checkpoints in dir by step, newest first. Their names are all that is known
// of them.
func list(dir store) ([]found, error) {
	var entries []fs.DirEntry
	err := again(dir, func() (err error) {
		if err = dir.Refresh(); err == nil {
			entries, err = dir.List()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var all []found
	for _, e := range entries {
		m := dirPattern.FindStringSubmatch(e.Name())
		if m == nil || !e.IsDir() {
			continue
		}
		step, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			return nil, err
		}
		all = append(all, found{e.Name(), step, m[2] != ""})
	}
	slices.SortFunc(all, func(a, b found) int {
		return cmp.Or(cmp.Compare(b.step, a.step), cmp.Compare(a.name, b.name)) // without .old first
	})
	return all, nil
}
