package command

import (
	"context"
	"os"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/place/key"
)

// key is the secret of the job, by which its agents know each other. close ends its spreading, and is
// called with the job.
func (t *together) key(ctx context.Context) (secret []byte, close func(), err error) {
	source := key.Source{
		File: launch.Getenv(launch.EnvKeyFile), Stdin: os.Stdin,
		Refused: func(err error) { t.note("the job's key was not given to somebody who asked: %v", err) },
	}
	k, server, err := source.Share(ctx, *t.at)
	if err != nil {
		return nil, nil, &InputError{err}
	}
	return k[:], func() { server.Close() }, nil // its listener, which nobody needs any more
}
