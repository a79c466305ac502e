// Package drivers has the object stores that package snapshots can open. They are apart because they are large: only a
// program that opens a store imports them.
package drivers

import (
	_ "gocloud.dev/blob/azureblob" // azblob://
	_ "gocloud.dev/blob/fileblob"  // file://
	_ "gocloud.dev/blob/gcsblob"   // gs://
	_ "gocloud.dev/blob/s3blob"    // s3://
)
