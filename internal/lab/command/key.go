package command

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/place/key"
)

// keyTime bounds the wait for a key that another node has made.
const keyTime = 30 * time.Second

// key returns the secret by which the agents of the job know each other.
func (t *multiNode) key(ctx context.Context) ([]byte, error) {
	var k key.Key
	path, err := t.keyFile()
	if named := launch.Getenv(launch.EnvKeyFile); named != "" {
		k, err = key.File(named, os.Stdin)
	} else if err == nil {
		ctx, cancel := context.WithTimeout(ctx, keyTime)
		defer cancel()
		k, err = key.Shared(ctx, path)
	}
	if err != nil {
		return nil, &InputError{err}
	}
	return k[:], nil
}

// keyFile names the file of the key. It lies in the run directory. Without --run-dir, in which case the leader names
// that directory later, it lies in runs and has the name of the job.
func (t *multiNode) keyFile() (string, error) {
	id := launch.Getenv("SLURM_JOB_ID")
	if id == "" && t.at.LocalAgents == t.at.MaxAgents { // agents of one host share its files
		id = fmt.Sprintf("%.8x", sha256.Sum256([]byte(t.at.Job)))
	}
	switch {
	case t.RunDir != "":
		return filepath.Abs(filepath.Join(t.RunDir, ".key"))
	case id != "":
		return filepath.Abs(filepath.Join("runs", ".job-"+id+".key"))
	}
	return "", errors.New("the nodes of the job need a key, so that no other process on the network joins it: " +
		"pass --run-dir with a directory that all nodes share, or " + key.Fix)
}
