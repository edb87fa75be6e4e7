package train

import (
	"errors"
	"os"

	"github.com/cprun/cprun/internal/base/files"
)

// runDirs holds open the directories that a rank writes into: no link in them leads out of the
// run directory, and one that is removed under the run is not made again.
type runDirs struct {
	run, checkpoints, logs *os.Root
}

// openDirs opens a run directory, which is there, and those in it.
func openDirs(path string) (d runDirs, err error) {
	if d.run, err = files.OpenDir(path); err != nil {
		return d, err
	}
	if d.checkpoints, err = files.Sub(d.run, "checkpoints"); err == nil {
		d.logs, err = files.Private(d.run, "logs")
	}
	if err != nil {
		return runDirs{}, errors.Join(err, d.close())
	}
	return d, nil
}

// close closes what was opened.
func (d *runDirs) close() error {
	var errs []error
	for _, root := range []*os.Root{d.logs, d.checkpoints, d.run} {
		if root != nil {
			errs = append(errs, root.Close())
		}
	}
	*d = runDirs{}
	return errors.Join(errs...)
}
