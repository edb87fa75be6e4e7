package command

import (
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
)

// stateBytes is what a checkpoint has of each parameter: its weight and two moments, in float32.
const stateBytes = 3 * 4

// checkLocal finds what keeps a checkpoint from being written to the directory of this node that the
// config names, before training and not at the first save.
func checkLocal(cfg *config.Config, hosts int) error {
	dir := cfg.Checkpoint.Local
	if dir == "" {
		return nil
	}
	if st, err := files.Stat(dir); err == nil && !st.IsDir() {
		return inputf("checkpoint.local: %s is a file; name a directory", terminal.Name(dir))
	}
	free, err := files.Free(dir)
	if err != nil {
		return inputf("checkpoint.local: %w; name a directory on a disk of this node", err)
	}
	if need := stateBytes * model.Count(model.Layout(&cfg.Model.Config)) / int64(max(1, hosts)); need > free {
		return inputf("checkpoint.local: this node's part of a checkpoint has %s, and %s has %s free; free space "+
			"there, name another directory, or unset the key",
			readable.Bytes(need), terminal.Name(dir), readable.Bytes(free))
	}
	return nil
}
